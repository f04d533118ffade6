"""A request ends at its deadline, or when it has waited too long for its first step; once, with what it has."""

from __future__ import annotations

import math

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.deadlines import MIN_PRUNE
from support.fake_runner import expected_tokens
from support.harness import Harness


def add(h: Harness, name: str, tokens: int = 30, **fields) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    h.send(AddRequest(name, [1, 2, 3], params, **fields))


@pytest.mark.parametrize("paused", [False, True])
def test_a_deadline_ends_it_with_what_it_has_whatever_state_the_engine_is_in(paused):
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
    assert h.stream("r").tokens == expected_tokens([1, 2, 3], seen + (not paused))
    assert not len(h.engine.lifecycle.requests) and h.engine.kv.num_free == h.runner.info.num_blocks


def test_who_waits_too_long_for_its_first_step_ends_without_a_token():
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


def test_who_has_begun_is_not_in_the_queue_any_more():
    h = Harness()
    add(h, "r", max_queue_s=5.0)
    h.run_rounds(2)
    h.pause(mode="keep", clear_cache=True)  # back in the queue, with tokens
    h.now += 6.0
    h.run_rounds()
    h.resume()
    h.run_out()
    assert h.stream("r").reason == "length"


def test_who_was_half_prefilled_has_had_its_first_step():
    h = Harness(max_num_batched_tokens=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    h.send(AddRequest("r", list(range(1, 41)), params, max_queue_s=5.0))
    h.run_rounds(2)
    h.pause(mode="keep", clear_cache=True)  # back in the queue, without a token
    h.now += 6.0
    h.run_rounds()
    h.resume()
    h.run_out()
    assert h.stream("r").reason == "length"


def test_a_group_has_left_the_queue_with_its_first_choice():
    h = Harness(max_num_seqs=1)
    add(h, "g", tokens=4, n=2, max_queue_s=5.0)
    h.run_rounds(2)
    h.now += 6.0
    h.run_out()
    assert [h.stream("g", i).reason for i in range(2)] == ["length"] * 2


def test_an_idle_or_frozen_loop_wakes_up_for_it():
    h = Harness(heartbeat_s=1000.0)
    h.pause(mode="keep", admission="hold")
    add(h, "r", deadline_s=5.0)
    h.run_rounds()
    assert 0 < h.engine._idle_time() <= 5.0


def test_every_choice_of_a_group_ends():
    h = Harness()
    add(h, "g", n=3, deadline_s=1.0)
    h.run_rounds(3)
    h.now += 2.0
    h.run_rounds()
    assert [h.stream("g", i).finals[0].stop_reason for i in range(3)] == ["deadline"] * 3


def test_one_that_ended_long_before_its_deadline_is_forgotten():
    h = Harness()
    for i in range(MIN_PRUNE + 2):
        add(h, f"r{i}", tokens=1, deadline_s=1e6)
        h.engine.run_once(block=False)
    h.run_out()
    assert len(h.engine.lifecycle.deadlines._heap) <= 10


@pytest.mark.parametrize("name, value, field", [
    ("max_queue_s", -1.0, "max_queue_s"),
    ("max_queue_s", math.inf, "max_queue_s"),
    ("max_queue_s", math.nan, "max_queue_s"),
    ("deadline_s", math.nan, "deadline_s"),
    ("deadline_s", math.inf, "deadline_s"),
])  # fmt: skip
def test_a_time_out_of_range_is_refused(name, value, field):
    h = Harness()
    add(h, "r", **{name: value})
    h.run_rounds()
    assert h.rejected("r").detail["param"] == field
