"""The figures of a run, its ledger, and the tables, which go into the page between its markers."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.lib.ways.figures import (
    QUIET_S,
    Silence,
    accuracy,
    goodput,
    joined,
    lag,
    lengths,
    mean,
    silence,
    smallest,
    wrong_mismatches,
)
from benchmarks.lib.ways.ledger import accounts, mistakes, unexplained
from benchmarks.lib.ways.record import CONTROL, WAYS, TokenTime, read
from benchmarks.lib.ways.table import fill_in, tables
from support.sync_run import MadeUpRun

KEEP, RECOMPUTE = WAYS[3], WAYS[4]


def test_silences_are_the_long_gaps_until_the_last_commit_per_commit():
    at = [0.0, 0.01, 0.01 + QUIET_S, 0.5, 0.51, 2.0, 2.01, 9.0]
    epochs = [0, 0, 0, 1, 1, 2, 2, 2]
    times = [TokenTime(t, 4, epoch) for t, epoch in zip(at, epochs, strict=True)]
    found = silence(times)
    assert found.per_update == pytest.approx((0.5 - 0.01 - QUIET_S + 2.0 - 0.51) / 2)
    assert found.longest == pytest.approx(2.0 - 0.51), "the gap before 9.0 belongs to no update"


def test_the_lag_of_a_token_counts_the_publications_before_it_was_trained(tmp_path):
    record = read(MadeUpRun(WAYS[3]).write(tmp_path))
    assert lag(record) == Counter({0: 240 - 30, 1: 30})
    record.rollouts[0].t = 2.7  # after the commit of publication 3
    assert lag(record) == Counter({0: 180, 1: 30, 3: 30})


def test_percentiles_and_means_count_each_value_as_often_as_it_came():
    counts = Counter({0: 90, 1: 5, 7: 5})
    assert [smallest(counts, percent) for percent in (50, 90, 95, 95.1, 100)] == [0, 0, 1, 7, 7]
    assert mean(counts) == pytest.approx(0.4)
    assert smallest(Counter(), 50) == 0 == mean(Counter())


def test_goodput_spreads_trained_tokens_over_the_time_of_their_generation(tmp_path):
    made = MadeUpRun(WAYS[3])
    record = read(made.write(tmp_path))
    record.rollouts = record.rollouts[:1]
    record.rollouts[0].started, record.rollouts[0].ended = 0.5, 3.5
    assert [(at, round(rate, 6)) for at, rate in goodput(record, 1.0)] == [
        (0.5, 5.0), (1.5, 10.0), (2.5, 10.0), (3.5, 5.0), (4.5, 0.0)
    ]  # fmt: skip
    record.rollouts[0].fate = "discarded"
    assert {rate for _, rate in goodput(record, 1.0)} == {0.0}


def test_accuracy_is_told_by_time_and_by_tokens_trained_until_then(tmp_path):
    by_time, by_tokens = accuracy(read(MadeUpRun(WAYS[3]).write(tmp_path)))
    assert by_time[:2] == [(0.0, 370 / 800), (pytest.approx(0.8), 0.5)]
    assert [tokens for tokens, _ in by_tokens] == [0, 60, 120, 180, 240]


def test_the_silences_mismatches_and_lengths_of_a_run(tmp_path):
    record = read(MadeUpRun(WAYS[3], mismatch=0.25).write(tmp_path))
    assert silence(record.token_times) == Silence(pytest.approx(0.2), pytest.approx(0.2))
    assert Counter(lengths(record)) == Counter({30: 8, 10: 1}), "without the rollout that is in flight"
    found = joined([update.mismatch for update in record.updates])
    assert (found.tokens, found.max_abs, found.ratio_max, found.kl) == (160, 0.25, 1.25, pytest.approx(0.025))


@pytest.mark.parametrize(
    ("way", "seen", "mixed", "wrong"),
    [
        (KEEP, 0.0, 0.1, []),
        (KEEP, 1e-9, 0.0, ["logprobs of answers of one version differ by up to 1e-09"]),
        (RECOMPUTE, 0.0, 0.0, []),
        (RECOMPUTE, 0.0, 1e-9, ["logprobs of tokens whose KV is of one version differ by up to 1e-09"]),
        (CONTROL, 0.1, 0.1, []),
        (CONTROL, 0.0, 0.1, ["the stale KV does not show"]),
    ],
)
def test_only_mixed_kv_may_and_only_the_control_run_must_have_a_mismatch(tmp_path, way, seen, mixed, wrong):
    assert wrong_mismatches(read(MadeUpRun(way, mismatch=seen, mixed=mixed).write(tmp_path))) == wrong


def test_a_run_that_compares_no_answer_is_wrong(tmp_path):
    made = MadeUpRun(WAYS[0])
    for event in made.events:
        event.pop("mismatch", None)
    assert wrong_mismatches(read(made.write(tmp_path))) == ["no answer was compared"]


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


@pytest.fixture
def records(tmp_path):
    runs = [MadeUpRun(way, seed) for way in (WAYS[0], WAYS[4]) for seed in range(3)] + [
        MadeUpRun(CONTROL, mismatch=0.5)
    ]
    return [read(made.write(tmp_path / str(number))) for number, made in enumerate(runs)]


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_table_of_ways_has_a_row_per_way_with_the_band_over_its_seeds(records):
    rows = cells(tables(records)["ways"])
    assert list(rows) == ["synchronous", "keep, recompute"], "the control run is no way"
    assert rows["synchronous"] == ["57.6 (57.5 to 57.8) %", "4", "53", "200", "200", "0.12", "1"]


def test_the_table_of_the_ledger_adds_up_the_seeds(records):
    rows = cells(tables(records)["ledger"])
    assert list(rows) == ["synchronous", "keep, recompute", "stale KV (control)"]
    assert rows["synchronous"] == [
        "1,521", "720 (47.3%)", "30 stale", "21 (1.4%)", "750 (49.3%)", "0", "36 (2.4%)"
    ]  # fmt: skip


def test_the_table_of_mismatch_has_the_control_run(records):
    rows = cells(tables(records)["mismatch"])
    assert rows["keep, recompute"] == ["480", "0", "0", "1", "240", "0", "0", "1"]
    assert rows["stale KV (control)"][:4] == ["160", "0.5", "0.05", "1.5"]


def test_the_table_of_lengths_counts_the_answers_that_ended(records):
    assert cells(tables(records)["lengths"])["synchronous"] == ["27", "30", "30", "30", "30"]


def test_a_page_is_filled_in_between_its_markers_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a begins -->\nold\n<!-- a ends -->\nafter\n")
    fill_in(page, {"a": "| \\1 |\n"})
    assert page.read_text() == "before\n<!-- a begins -->\n| \\1 |\n<!-- a ends -->\nafter\n"
    with pytest.raises(ValueError, match="expected each of the markers '<!-- b begins -->'"):
        fill_in(page, {"b": ""})
