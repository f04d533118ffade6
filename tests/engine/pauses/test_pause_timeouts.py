"""Drains that time out."""

from __future__ import annotations

import pytest

from engine.pause_calls import LONG, busy, call_pause, tokens_of


def test_a_drain_that_times_out_freezes_what_is_left_by_default():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0)
    h.now += 10.0
    h.run_rounds(3)
    report = h.reply(call).result
    assert report["is_paused"] and report["mode"] == "keep" and report["escalated_by"] == "timeout"
    assert report["counts"]["kept"] == 4 and report["forced_ids"] == []
    h.resume()
    h.run_out()
    assert tokens_of(h) == [LONG] * 6


def test_on_timeout_abort_reports_the_requests_that_it_aborted():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0, on_timeout="abort")
    h.now += 10.0
    h.run_rounds(3)
    report = h.reply(call).result
    assert report["mode"] == "keep" and report["escalated_by"] == "timeout" and report["is_paused"]
    assert sorted(report["forced_ids"]) == [f"r{i}" for i in range(6)] and report["counts"]["aborted"] == 6
    assert report["aborted_ids"] == report["forced_ids"]
    assert report["tokens_returned"] == sum(tokens_of(h))


def test_what_comes_after_an_abort_at_the_time_out_waits_for_the_resume():
    h = busy()
    call_pause(h, mode="wait", timeout_s=10.0, on_timeout="abort", hold_id="x")
    h.now += 10.0
    h.run_rounds(3)
    h.add("later", [7, 8], max_tokens=2)
    (hold,) = h.status()["holds"]
    call_pause(h, mode=hold["mode"], admission=hold["admission"], hold_id="x")  # as a gateway that takes over does
    h.run_rounds(3)
    assert h.stream("later").reason is None
    h.resume(hold_id="x")
    h.run_out()
    assert h.stream("later").reason == "length"


def test_on_timeout_cancel_lets_the_engine_run_again():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=10.0, on_timeout="cancel")
    h.now += 10.0
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_timeout" and h.status()["phase"] == "running"
    h.run_out()
    assert tokens_of(h) == [LONG] * 6


def test_all_callers_of_one_hold_that_times_out_are_answered():
    h = busy()
    waiting = {"mode": "wait", "hold_id": "x", "timeout_s": 10.0}
    calls = [call_pause(h, **waiting, on_timeout=on_timeout) for on_timeout in ("cancel", "abort", "cancel")]
    h.now += 10.0
    h.run_rounds(2)
    assert [h.reply(call).failure.code for call in calls] == ["pause_timeout"] * 3
    assert h.status()["phase"] == "running" and h.stream("r0").reason is None, "no abort once the hold is gone"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_abort_and_keep_need_no_time_to_drain(mode):
    h = busy()
    assert h.pause(mode=mode, timeout_s=0.0, on_timeout="cancel").failure is None
