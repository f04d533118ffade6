"""The figures of one stream, and those of a load."""

from __future__ import annotations

import pytest

from fastdeploy.bench.stats import summarize
from fastdeploy.bench.timeline import StreamLog, TokenEvent, median_step


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


def test_a_stream_with_a_token_after_its_final_chunk_is_not_correct():
    log = log_at(1.0, 3.0)
    log.finals, log.done_markers = [(2.0, "abort")], 1
    assert not log.ended_once
    log.tokens.pop()
    assert log.ended_once


def stream(sent: float, times: list[float], ids: int = 1) -> StreamLog:
    tokens = [TokenEvent(t, list(range(ids)), "x") for t in times]
    return StreamLog("r", sent, 200, tokens, [(times[-1], "length")], done_markers=1)


def test_figures_of_two_streams():
    stats = summarize([stream(0.0, [0.5, 0.6, 0.7]), stream(1.0, [1.3, 1.5, 2.0])])
    assert (stats.completed, stats.failed, stats.output_tokens) == (2, 0, 6)
    assert stats.duration_s == pytest.approx(2.0)
    assert stats.tokens_per_s == pytest.approx(3.0)
    assert stats.ttft.mean == pytest.approx(0.4)
    assert stats.tpot.at[50] == pytest.approx((0.1 + 0.35) / 2)
    assert stats.itl.count == 4 and stats.itl.at[99] == pytest.approx(0.5, abs=0.02)
    assert stats.e2e.mean == pytest.approx((0.7 + 1.0) / 2)


def test_chunks_of_several_tokens_count_all_of_them():
    stats = summarize([stream(0.0, [1.0, 2.0], ids=4)])
    assert stats.output_tokens == 8
    assert stats.tpot.mean == pytest.approx(1.0 / 7)


def test_failed_requests_are_counted_and_enter_no_figure():
    bad = StreamLog("r", 0.0, 429, error="queue full")
    half = stream(0.0, [0.5, 0.6])
    half.finals = []
    stats = summarize([stream(0.0, [1.0, 2.0]), bad, half])
    assert (stats.completed, stats.failed, stats.ttft.count) == (1, 2, 1)
    assert "queue full" in stats.errors


def test_a_server_without_token_ids_counts_its_tokens_in_the_usage():
    log = StreamLog("r", 0.0, 200)
    log.add_event(1.0, b'{"choices": [{"text": "a", "finish_reason": null}], "usage": null}')
    log.add_event(3.0, b'{"choices": [{"text": "bc", "finish_reason": null}]}')
    log.add_event(3.0, b'{"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}')
    log.add_event(3.0, b"[DONE]")
    stats = summarize([log])
    assert (stats.completed, stats.output_tokens) == (1, 3) and stats.tpot.mean == pytest.approx(1.0)
