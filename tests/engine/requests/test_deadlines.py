"""Requests with a deadline, and with a limit of the time until their first step."""

from __future__ import annotations

import math

import pytest

from fastdeploy.engine.requests.lifecycle import MIN_PRUNE
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness


def add(h: Harness, name: str, tokens: int = 30, **fields) -> None:
    h.add(name, PROMPT, max_tokens=tokens, **fields)


@pytest.mark.parametrize("paused", [False, True])
def test_a_request_ends_at_its_deadline_with_the_tokens_it_has_paused_or_not(paused):
    h = Harness()
    add(h, "r", deadline_s=5.0)
    h.run_rounds(4)
    if paused:
        h.pause(mode="keep")
    seen = len(h.stream("r").tokens)
    h.now += 4.0
    h.run_rounds()
    assert not h.stream("r").finals
    h.now += 1.5
    h.run_rounds()
    (final,) = h.stream("r").finals
    assert (final.finish_reason, final.stop_reason) == ("abort", "deadline") and "deadline" in final.message
    assert h.stream("r").tokens == expected_tokens(PROMPT, seen + (not paused))
    assert not len(h.engine.lifecycle.requests) and h.engine.kv.num_free == h.runner.info.num_blocks


def test_a_request_that_waits_too_long_for_its_first_step_ends_without_a_token():
    h = Harness(max_num_seqs=1)
    add(h, "first")
    h.run_rounds(2)
    add(h, "second", max_queue_s=5.0)
    h.run_rounds()
    h.now += 6.0
    h.run_rounds()
    (final,) = h.stream("second").finals
    assert final.stop_reason == "queue_timeout" and final.message.startswith("Abort before prefill")
    assert h.stream("second").tokens == []
    h.run_out()
    assert len(h.stream("first").tokens) == 30


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_request_that_a_pause_puts_back_in_the_queue_has_had_its_first_step(has_tokens):
    h = Harness(max_num_batched_tokens=64 if has_tokens else 4)
    h.add("r", list(range(1, 41)), max_tokens=4, max_queue_s=5.0)
    h.run_rounds(2)
    assert bool(h.stream("r").tokens) == has_tokens
    h.pause(mode="keep", clear_cache=True)
    h.now += 6.0
    h.run_rounds()
    h.resume()
    h.run_out()
    assert h.stream("r").reason == "length"


def test_all_choices_leave_the_queue_with_the_first_one():
    h = Harness(max_num_seqs=1)
    add(h, "g", tokens=4, n=2, max_queue_s=5.0)
    h.run_rounds(2)
    h.now += 6.0
    h.run_out()
    assert [h.stream("g", i).reason for i in range(2)] == ["length"] * 2


def test_a_paused_loop_wakes_up_for_a_deadline():
    h = Harness(heartbeat_s=1000.0)
    h.pause(mode="keep", admission="hold")
    add(h, "r", deadline_s=5.0)
    h.run_rounds()
    assert 0 < h.engine._idle_time() <= 5.0


def test_a_deadline_ends_every_choice():
    h = Harness()
    add(h, "g", n=3, deadline_s=1.0)
    h.run_rounds(3)
    h.now += 2.0
    h.run_rounds()
    assert [h.stream("g", i).finals[0].stop_reason for i in range(3)] == ["deadline"] * 3


def test_deadlines_of_requests_that_have_ended_are_removed():
    h = Harness()
    for i in range(MIN_PRUNE + 2):
        add(h, f"r{i}", tokens=1, deadline_s=1e6)
        h.engine.run_once(block=False)
    h.run_out()
    assert len(h.engine.lifecycle._deadlines._heap) <= 10


@pytest.mark.parametrize("field", ["max_queue_s", "deadline_s"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_time_out_of_range_is_refused(field, value):
    h = Harness()
    add(h, "r", **{field: value})
    h.run_rounds()
    assert h.rejected("r").detail["param"] == field
