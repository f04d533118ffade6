"""The table of the transaction, one rule at a time."""

from __future__ import annotations

import pytest

from fastdeploy.fleet.transaction import ENTRY, OUTCOMES, Fence, Phase, Rule, Send, Step, Tally, Transaction, Vote


def begun(rule: Rule, names: str = "abc") -> Transaction:
    transaction = Transaction(names, rule)
    assert transaction.start() == [Send(name, Step.PREPARE) for name in names]
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
    assert transaction.answer("a", Step.PREPARE, True) == transaction.answer("b", Step.PREPARE, True) == []
    assert transaction.answer("c", Step.PREPARE, True) == [Send(name, Step.COMMIT) for name in "abc"]
    for name in "abc":
        assert transaction.answer(name, Step.COMMIT, True) == []
    assert transaction.phase is Phase.DONE


@pytest.mark.parametrize("rule", [Rule.UNDO, Rule.COMMIT])
def test_a_refusal_rolls_all_back(rule):
    transaction = begun(rule)
    transaction.answer("a", Step.PREPARE, True)
    transaction.answer("b", Step.PREPARE, False)
    assert transaction.answer("c", Step.PREPARE, True) == [Send(name, Step.ROLLBACK) for name in "abc"]
    transaction.answer("a", Step.ROLLBACK, True)
    assert transaction.answer("b", Step.ROLLBACK, False) == [Fence("b", "the rollback was refused")]
    transaction.answer("c", Step.ROLLBACK, True)
    assert transaction.phase is Phase.FAILED


def test_who_misses_the_deadline_is_fenced_and_the_others_go_on():
    transaction = begun(Rule.COMMIT, "ab")
    transaction.answer("a", Step.PREPARE, True)
    fence, send = transaction.deadline(Step.PREPARE)
    assert isinstance(fence, Fence) and fence.name == "b" and send == Send("a", Step.COMMIT)
    assert transaction.deadline(Step.PREPARE) == []  # of a step that is over
    assert transaction.answer("b", Step.PREPARE, True) == []  # late
    transaction.answer("a", Step.COMMIT, True)
    assert transaction.phase is Phase.DONE and transaction.votes["b"] is Vote.LOST


def test_late_and_doubled_answers_change_nothing():
    transaction = begun(Rule.COMMIT, "ab")
    transaction.answer("a", Step.PREPARE, True)
    for step in Step:
        for accepted in (True, False):
            assert transaction.answer("a", step, accepted) == []
    assert transaction.votes == {"a": Vote.PREPARED, "b": Vote.ASKED}


@pytest.mark.parametrize("rule", [Rule.AGREE, Rule.COMMIT])
def test_who_refuses_what_another_has_done_is_fenced_but_not_if_all_refuse(rule):
    for accepts, fenced, phase in ((True, ["b"], Phase.DONE), (False, [], Phase.FAILED)):
        transaction, step = begun(rule, "ab"), Step.PREPARE
        if rule is Rule.COMMIT:
            step = Step.COMMIT
            for name in "ab":
                transaction.answer(name, Step.PREPARE, True)
        actions = transaction.answer("a", step, accepts) + transaction.answer("b", step, False)
        assert [action.name for action in actions if isinstance(action, Fence)] == fenced
        for name in "ab":
            transaction.answer(name, Step.ROLLBACK, True)
        assert transaction.phase is phase


def test_a_call_fails_if_everybody_is_lost_and_a_refusal_stands_if_its_replica_is_lost():
    transaction = begun(Rule.AGREE, "ab")
    assert transaction.lose("a", "gone") == [Fence("a", "gone")]
    assert transaction.lose("a", "gone") == []
    transaction.lose("b", "gone")
    assert transaction.phase is Phase.FAILED and transaction.tally() is Tally.NOBODY
    transaction = begun(Rule.UNDO, "ab")
    transaction.answer("a", Step.PREPARE, False)
    assert transaction.lose("a", "gone") == []
    assert transaction.answer("b", Step.PREPARE, True) == [Send("a", Step.ROLLBACK), Send("b", Step.ROLLBACK)]
