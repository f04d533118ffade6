"""Pauses and resumes that meet: each call is answered, and a stronger pause escalates a weaker one."""

from __future__ import annotations

from engine.pause_calls import busy, call_pause, tokens_of
from fastdeploy.inter_communicator import messages as m


def test_two_pauses_at_once_are_both_answered():
    h = busy(max_tokens=12)
    first = call_pause(h, mode="wait")
    second = call_pause(h, mode="wait")
    h.run_rounds(20)
    assert h.reply(first).failure is None and h.reply(second).failure is None
    assert len(h.status()["holds"]) == 2


def test_the_report_of_a_pause_names_the_stronger_pause_that_escalated_it():
    h = busy()
    first = call_pause(h, mode="wait", hold_id="w")
    second = call_pause(h, mode="abort", hold_id="z")
    h.run_rounds(3)
    assert h.reply(first).failure is None
    assert (h.reply(first).result["mode"], h.reply(first).result["escalated_by"]) == ("abort", "z")
    assert h.reply(second).result["escalated_by"] is None and h.reply(second).result["counts"]["aborted"] == 6


def test_a_pause_may_be_escalated_under_the_same_name():
    h = busy()
    first = call_pause(h, mode="wait", hold_id="x")
    call_pause(h, mode="keep", hold_id="x")
    h.run_rounds(2)
    assert h.reply(first).result["mode"] == "keep" and h.reply(first).result["escalated_by"] == "x"


def test_abort_after_keep_ends_the_frozen_requests_without_a_step():
    h = busy()
    h.pause(mode="keep")
    before = h.runner.computed_tokens
    report = h.pause(mode="abort").result
    assert report["counts"]["aborted"] == 6 and report["is_paused"]
    assert [h.stream(f"r{i}").reason for i in range(6)] == ["abort"] * 6
    assert h.runner.computed_tokens == before and h.engine.kv.num_free == h.runner.info.num_blocks


def test_a_resume_during_a_drain_answers_the_released_callers_with_the_report_so_far():
    h = busy(max_tokens=12)
    anonymous, named = call_pause(h, mode="wait"), call_pause(h, mode="wait", hold_id="x")
    reply = h.resume()
    assert reply.result["status"] == "held" and reply.result["state"] == "draining"
    assert h.reply(anonymous).failure.code == "pause_interrupted"
    assert h.reply(anonymous).result["status"] == "interrupted" and "counts" in h.reply(anonymous).result
    assert h.reply(named) is None
    h.run_rounds(20)
    assert h.reply(named).failure is None and h.status()["is_paused"]


def test_a_pause_and_a_resume_in_the_same_round_leave_the_engine_running():
    h = busy(max_tokens=12)
    call = h.call(m.PauseArgs(mode="keep"))
    resumed = h.call(m.ResumeArgs())
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_interrupted" and h.reply(resumed).result["status"] == "running"
    h.run_out()
    assert tokens_of(h) == [12] * 6
