"""New requests during a pause: held or rejected."""

from __future__ import annotations

import pytest

from engine.pause_calls import busy, call_pause
from support.fake_runner import expected_tokens
from support.harness import Harness


@pytest.mark.parametrize(("mode", "admission"), [("abort", "reject"), ("wait", "hold"), ("keep", "hold")])
def test_each_mode_has_its_own_default_of_admission_which_the_reply_names(mode, admission):
    h = Harness()
    assert h.pause(mode=mode).result["admission"] == admission
    h.add("new", [1, 2])
    h.run_rounds()
    assert (h.rejected("new") is not None) == (admission == "reject")


def test_requests_are_rejected_from_the_start_of_a_drain_until_the_last_hold_ends():
    h = busy()
    call_pause(h, mode="wait", admission="reject")
    assert h.status()["rejecting_new_requests"] and not h.status()["is_paused"]
    h.add("new", [1, 2])
    h.run_rounds()
    failure = h.rejected("new")
    assert failure.code == "rejecting_new_requests" and failure.detail["retry_after"] >= 1
    h.resume()
    h.add("new", [1, 2])
    h.run_rounds()
    assert h.stream("new").tokens or len(h.engine.scheduler.waiting)
    assert not h.status()["rejecting_new_requests"]


def test_admission_is_reject_while_any_hold_asks_for_it():
    h = Harness()
    h.pause(mode="keep", hold_id="x", admission="reject")
    h.pause(mode="abort", hold_id="y", admission="hold")
    assert h.status()["admission"] == "reject"
    h.resume("x")
    assert h.status()["admission"] == "hold"


def test_held_requests_are_bounded_by_the_queue_limit_and_run_after_resume():
    h = Harness(max_waiting=3)
    h.pause(mode="keep")
    for i in range(5):
        h.add(f"r{i}", [i + 1])
    h.run_rounds()
    assert [h.rejected(f"r{i}") and h.rejected(f"r{i}").code for i in range(5)] == [None] * 3 + ["queue_full"] * 2
    h.resume()
    h.run_out()
    assert [h.stream(f"r{i}").reason for i in range(5)] == ["length"] * 3 + [None] * 2


def test_a_request_that_an_abort_pause_holds_is_not_aborted():
    h = busy()
    h.pause(mode="abort", admission="hold")
    h.add("new", [1, 2], max_tokens=3)
    h.run_rounds(3)
    assert h.stream("new").reason is None
    h.resume()
    h.run_out()
    assert h.stream("new").tokens == expected_tokens([1, 2], 3)
