from __future__ import annotations

import pytest

from benchmarks.lib.timeline import StreamLog, TokenEvent, gaps, is_prefix, median_step


def log_at(*times: float, ids: int = 1) -> StreamLog:
    return StreamLog("r", 0.0, 200, [TokenEvent(t, [7] * ids) for t in times])


def test_the_step_is_the_same_for_smooth_and_for_bursty_streams():
    smooth = log_at(*(1.0 + 0.1 * i for i in range(21)))
    bursty = log_at(*(1.0 + 0.4 * (i // 4) for i in range(81)))
    assert median_step([smooth], 0, 99) == pytest.approx(0.1)
    assert median_step([bursty], 0, 99) == pytest.approx(0.1)


def test_the_step_counts_tokens_not_chunks():
    assert median_step([log_at(1.0, 1.4, 1.8, ids=4)], 0, 99) == pytest.approx(0.1)


def test_the_step_ignores_what_lies_outside_the_window():
    log = log_at(0.0, 5.0, 10.0, 10.1, 10.2, 20.0)
    assert median_step([log], 10.0, 11.0) == pytest.approx(0.1)


def test_without_two_tokens_the_step_is_unknown():
    assert median_step([log_at(1.0), StreamLog("r", 0.0)], 0, 99) == 0.0


def test_gaps_are_between_consecutive_chunks():
    assert gaps(log_at(1.0, 1.5, 3.5)) == [0.5, 2.0]


def test_a_prefix_is_the_beginning_of_a_sequence():
    assert is_prefix([], [1]) and is_prefix([1], [1, 2]) and is_prefix([1, 2], [1, 2])
    assert not is_prefix([1, 2], [1]) and not is_prefix([2], [1, 2])


def test_a_stream_with_a_token_after_its_final_chunk_is_not_correct():
    log = log_at(1.0, 3.0)
    log.finals, log.done_markers = [(2.0, "abort")], 1
    assert not log.ended_once
    log.tokens.pop()
    assert log.ended_once
