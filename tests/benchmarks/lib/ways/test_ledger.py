"""The ledger finds a token that nobody explains, and one that is counted twice."""

from __future__ import annotations

import pytest

from benchmarks.lib.ways.ledger import accounts, mistakes, unexplained
from benchmarks.lib.ways.record import WAYS, read
from support.sync_run import MadeUpRun


@pytest.fixture
def made() -> MadeUpRun:
    return MadeUpRun(WAYS[3])


def rollouts(made: MadeUpRun, fate: str) -> list[dict]:
    return [event for event in made.events if event["kind"] == "rollout" and event["fate"] == fate]


def test_a_ledger_in_which_every_token_is_explained_balances(made, tmp_path):
    record = read(made.write(tmp_path))
    told = {"evaluated": 250, "trained": 240, "discarded: stale": 10, "in_flight": 7}
    assert accounts(record) == {"generated": 4 * 60 + 10 + 7 + 5 * 50, "recomputed": 12} | told
    assert unexplained(accounts(record)) == 0
    assert mistakes(record) == []


def test_a_token_that_the_engine_sampled_and_the_trainer_does_not_tell_of_is_found(made, tmp_path):
    made.times.append((200.0, 1, 4))
    made.engine["generated"] += 1
    found = mistakes(read(made.write(tmp_path)))
    assert found == [f"1 tokens {where} are unexplained: the engine sampled them, the trainer does not tell of them"
                     for where in ("in all", "of weight_epoch 4")]  # fmt: skip


def test_a_rollout_that_is_told_of_twice_is_found(made, tmp_path):
    made.events.insert(-1, rollouts(made, "in_flight")[0])
    found = mistakes(read(made.write(tmp_path)))
    assert found == [f"7 tokens {where} are told of twice, or the engine did not sample them"
                     for where in ("in all", "of weight_epoch 4")]  # fmt: skip


def test_a_lost_token_is_found_beside_a_doubled_one_of_other_weights(made, tmp_path):
    """The sum of all tokens is right."""
    discarded, trained = rollouts(made, "discarded")[0], rollouts(made, "in_flight")[0]
    discarded.update(tokens=11, spans=[[3, 0, 11]])
    trained.update(tokens=6, spans=[[4, 0, 6]])
    record = read(made.write(tmp_path))
    assert unexplained(accounts(record)) == 0
    assert [line.partition(" are ")[0] for line in mistakes(record)] == [
        "11 tokens of weight_epoch 3", "11 tokens of weight_epoch 4"
    ]  # fmt: skip


@pytest.mark.parametrize("spans", [[[0, 0, 29]], [[0, 1, 30]], [[0, 0, 20], [1, 15, 30]], []])
def test_spans_that_do_not_cover_the_tokens_once_are_found(made, tmp_path, spans):
    rollouts(made, "trained")[0]["spans"] = spans
    assert any(line.startswith("rollout ") and " span" in line for line in mistakes(read(made.write(tmp_path))))


def test_an_update_that_trained_other_tokens_than_its_rollouts_have_is_found(made, tmp_path):
    next(event for event in made.events if event["kind"] == "update")["tokens"] = 61
    wanted = "the updates trained 241 tokens, the rollouts that were trained have 240"
    assert mistakes(read(made.write(tmp_path))) == [wanted]


def test_a_counter_that_differs_from_the_noted_times_is_found(made, tmp_path):
    made.times.pop()
    assert "the engine counted 507 tokens, and noted times of 506" in mistakes(read(made.write(tmp_path)))


def test_a_line_that_is_not_as_expected_is_named(made, tmp_path):
    del made.events[1]["tokens"]
    with pytest.raises(ValueError, match=r"events.jsonl:2: .*`tokens`"):
        read(made.write(tmp_path))


def test_a_run_without_its_last_line_is_refused(made, tmp_path):
    made.events.pop()
    with pytest.raises(ValueError, match="one line of kind end, got 0"):
        read(made.write(tmp_path))
