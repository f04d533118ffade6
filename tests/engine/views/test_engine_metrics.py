"""Metrics of pauses, commits and tokens: each counts what it says, once."""

from __future__ import annotations

import time

from fastdeploy.inter_communicator import messages as m
from support.harness import PROMPT, Harness, one_running


def metrics(h: Harness, name: str) -> dict[str, float]:
    """Return the samples of ``fastdeploy:<name>`` by their labels."""
    lines = h.ask(m.MetricsArgs()).result["text"].splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith(f"fastdeploy:{name}{{")]
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, value in rows if float(value)}


def test_a_pause_counts_once_by_its_first_mode_and_lasts_until_the_last_release():
    h = one_running(max_tokens=60)
    h.pause(mode="keep", hold_id="a")
    h.now += 2
    h.pause(mode="abort", hold_id="b")
    h.resume("a")
    h.now += 3
    assert h.metric("pause_seconds_count") == 0
    h.resume("b")
    assert metrics(h, "pauses_total") == {'mode="keep"': 1}
    assert (h.metric("pause_seconds_count"), h.metric("pause_seconds_sum")) == (1, 5)


def test_a_pause_of_an_adapter_is_no_pause_of_the_engine():
    h = Harness()
    h.load_adapter("alice", 1)
    h.pause(mode="keep", scope="adapter:alice")
    assert metrics(h, "pauses_total") == {}


def test_commits_count_by_scope_and_kv():
    h = Harness()
    h.update("w1")
    h.update("w2", kv="recompute")
    h.update("refused")
    h.load_adapter("alice", 1)
    found = metrics(h, "commits_total")
    assert found == {
        'kv="keep",scope="engine"': 1,
        'kv="recompute",scope="engine"': 1,
        'kv="keep",scope="adapter"': 1,
    }


def test_output_tokens_count_by_the_reason_of_the_end():
    h = one_running(max_tokens=60)
    h.add("done", PROMPT, max_tokens=5)
    h.run_rounds(10)
    h.ask(m.AbortArgs(abort_all=True))
    expected = {'reason="abort"': len(h.stream("r").tokens), 'reason="length"': 5}
    assert metrics(h, "ended_tokens_total") == expected


def test_the_version_lag_counts_the_commits_since_the_oldest_token():
    h = one_running(max_tokens=60)
    h.load_adapter("alice", 1)
    h.add("of-alice", PROMPT, max_tokens=60, adapter="alice")
    h.run_rounds(2)
    h.update("w1")
    h.update("w2", kv="recompute")
    h.load_adapter("alice", 2)
    h.add("late", PROMPT, max_tokens=2)
    h.run_rounds(100)
    assert h.metric("request_version_lag_count") == 3
    assert h.metric("request_version_lag_sum") == 2 + 3 + 0
    assert h.metric("request_success_total") == 3


def test_a_sequence_that_is_aborted_or_has_no_token_has_no_version_lag():
    h = one_running(max_tokens=60)
    h.pause(mode="abort")
    h.add("refused", PROMPT, max_tokens=2)
    assert h.metric("request_version_lag_count") == 0
    assert h.metric("request_generation_tokens_count") == 1
    assert metrics(h, "requests_rejected_total") == {'code="rejecting_new_requests"': 1}


def test_the_oldest_hold_and_the_oldest_waiting_sequence_have_an_age():
    h = Harness()
    assert h.metric("oldest_hold_seconds") == h.metric("oldest_waiting_seconds") == 0
    h.pause(mode="keep", hold_id="a")
    h.now += 7
    h.pause(mode="keep", hold_id="b")
    h.add("waits", PROMPT, arrival=time.time() - 50)
    assert (h.metric("holds"), h.metric("oldest_hold_seconds")) == (2, 7)
    assert 50 <= h.metric("oldest_waiting_seconds") < 100


def test_blocks_of_a_cached_prefix_are_available_but_not_free():
    h = Harness()
    h.add("r", PROMPT, max_tokens=2)
    h.run_rounds(10)
    total = h.metric("max_gpu_block_num")
    assert h.metric("available_gpu_block_num") == total > h.metric("free_gpu_block_num") > 0
    assert h.metric("gpu_cache_usage_perc") == 0 and h.metric("hit_req_rate") == 0
    h.add("again", PROMPT, max_tokens=2)
    h.run_rounds(10)
    assert h.metric("hit_req_rate") == 0.5 and 0 < h.metric("hit_token_rate") < 0.5
