"""The figures of a run are those of its events."""

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
from benchmarks.lib.ways.record import CONTROL, WAYS, TokenTime, read
from support.sync_run import MadeUpRun

KEEP, RECOMPUTE = WAYS[3], WAYS[4]


def test_silences_are_the_long_gaps_until_the_last_commit_per_commit():
    at = [0.0, 0.01, 0.01 + QUIET_S, 0.5, 0.51, 2.0, 2.01, 9.0]
    epochs = [0, 0, 0, 1, 1, 2, 2, 2]
    times = [TokenTime(t, 4, epoch) for t, epoch in zip(at, epochs, strict=True)]
    found = silence(times)
    assert found.per_update == pytest.approx((0.5 - 0.01 - QUIET_S + 2.0 - 0.51) / 2)
    assert found.longest == pytest.approx(2.0 - 0.51), "the gap before 9.0 belongs to no update"


def test_a_run_without_a_commit_has_no_silence():
    assert silence([TokenTime(0.0, 1, 0), TokenTime(5.0, 1, 0)]) == silence([]) == Silence(0.0, 0.0)


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
