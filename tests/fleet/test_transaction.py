"""The table of the transaction, one rule at a time."""

from __future__ import annotations

import pytest

from fastdeploy.fleet.transaction import ENTRY, OUTCOMES, Command, Fence, Phase, Rule, Send, Tally, Transaction, Vote


def begun(rule: Rule, names: str = "abc") -> Transaction:
    transaction = Transaction(names, rule)
    assert transaction.start() == [Send(name, Command.PREPARE) for name in names]
    return transaction


def test_every_phase_that_can_be_reached_has_an_outcome_for_every_tally_that_can_be():
    for (phase, rule), outcomes in OUTCOMES.items():
        rolling_back = phase is Phase.ROLLING_BACK  # who refuses that is lost
        assert set(outcomes) == ({Tally.ALL, Tally.NOBODY} if rolling_back else set(Tally))
        for after in outcomes.values():
            assert after in (Phase.DONE, Phase.FAILED) or (after, rule) in OUTCOMES
            assert (after in ENTRY) == (after not in (Phase.DONE, Phase.FAILED))


def test_nobody_commits_before_all_have_prepared():
    transaction = begun(Rule.COMMIT)
    assert transaction.answer("a", Command.PREPARE, True) == transaction.answer("b", Command.PREPARE, True) == []
    assert transaction.answer("c", Command.PREPARE, True) == [Send(name, Command.COMMIT) for name in "abc"]
    for name in "abc":
        assert transaction.answer(name, Command.COMMIT, True) == []
    assert transaction.phase is Phase.DONE


@pytest.mark.parametrize("rule", [Rule.UNDO, Rule.COMMIT])
def test_a_refusal_rolls_all_back(rule):
    transaction = begun(rule)
    transaction.answer("a", Command.PREPARE, True)
    transaction.answer("b", Command.PREPARE, False)
    assert transaction.answer("c", Command.PREPARE, True) == [Send(name, Command.ROLLBACK) for name in "abc"]
    transaction.answer("a", Command.ROLLBACK, True)
    assert transaction.answer("b", Command.ROLLBACK, False) == [Fence("b", "the rollback was refused")]
    transaction.answer("c", Command.ROLLBACK, True)
    assert transaction.phase is Phase.FAILED


def test_who_misses_the_deadline_is_fenced_and_the_others_go_on():
    transaction = begun(Rule.COMMIT, "ab")
    transaction.answer("a", Command.PREPARE, True)
    fence, send = transaction.deadline(Command.PREPARE)
    assert isinstance(fence, Fence) and fence.name == "b" and send == Send("a", Command.COMMIT)
    assert transaction.deadline(Command.PREPARE) == []  # of a command that is over
    assert transaction.answer("b", Command.PREPARE, True) == []  # late
    transaction.answer("a", Command.COMMIT, True)
    assert transaction.phase is Phase.DONE and transaction.votes["b"] is Vote.LOST


def test_late_and_doubled_answers_change_nothing():
    transaction = begun(Rule.COMMIT, "ab")
    transaction.answer("a", Command.PREPARE, True)
    for command in Command:
        for accepted in (True, False):
            assert transaction.answer("a", command, accepted) == []
    assert transaction.votes == {"a": Vote.PREPARED, "b": Vote.ASKED}


@pytest.mark.parametrize("rule", [Rule.AGREE, Rule.COMMIT])
def test_who_refuses_what_another_has_done_is_fenced_but_not_if_all_refuse(rule):
    for accepts, fenced, phase in ((True, ["b"], Phase.DONE), (False, [], Phase.FAILED)):
        transaction, command = begun(rule, "ab"), Command.PREPARE
        if rule is Rule.COMMIT:
            command = Command.COMMIT
            for name in "ab":
                transaction.answer(name, Command.PREPARE, True)
        actions = transaction.answer("a", command, accepts) + transaction.answer("b", command, False)
        assert [action.name for action in actions if isinstance(action, Fence)] == fenced
        for name in "ab":
            transaction.answer(name, Command.ROLLBACK, True)
        assert transaction.phase is phase


def test_a_call_fails_if_everybody_is_lost_and_a_refusal_stands_if_its_replica_is_lost():
    transaction = begun(Rule.AGREE, "ab")
    assert transaction.lose("a", "gone") == [Fence("a", "gone")]
    assert transaction.lose("a", "gone") == []
    transaction.lose("b", "gone")
    assert transaction.phase is Phase.FAILED and transaction.tally() is Tally.NOBODY
    transaction = begun(Rule.UNDO, "ab")
    transaction.answer("a", Command.PREPARE, False)
    assert transaction.lose("a", "gone") == []
    assert transaction.answer("b", Command.PREPARE, True) == [Send("a", Command.ROLLBACK), Send("b", Command.ROLLBACK)]
