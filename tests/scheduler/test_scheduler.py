"""Order of requests, preemption, chunks of prompts, and the cost of scheduling."""

from __future__ import annotations

from collections import Counter

import pytest

from fastdeploy.core import request
from fastdeploy.engine import admission
from fastdeploy.inter_communicator import messages as m
from fastdeploy.scheduler.pacer import STRETCH
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness


def test_first_come_first_served_within_a_priority_and_smaller_priorities_first():
    h = Harness(max_num_seqs=1)
    h.add("now", [1], max_tokens=3)
    h.run_rounds()
    for name, priority in (("late", 5), ("second", 0), ("third", 0), ("urgent", -1)):
        h.add(name, [2], priority=priority, max_tokens=2)
    names, finished = ["now", "urgent", "second", "third", "late"], []
    for _ in range(20):
        h.run_rounds()
        finished += [n for n in reversed(names) if h.stream(n).finals and n not in finished]
    assert finished == names


def test_a_request_of_an_older_session_goes_before_those_that_came_earlier():
    h = Harness(max_num_seqs=1)
    h.add("now", [1], max_tokens=3)
    h.run_rounds()
    for name, fields in (("plain", {}), ("young", {"session_began": 20.0}), ("old", {"session_began": 10.0})):
        h.add(name, [2], max_tokens=2, **fields)
    h.add("urgent", [2], max_tokens=2, priority=-1)
    names, finished = ["now", "urgent", "old", "young", "plain"], []
    for _ in range(20):
        h.run_rounds()
        finished += [n for n in reversed(names) if h.stream(n).finals and n not in finished]
    assert finished == names


def test_the_last_request_in_order_is_preempted_and_computes_the_same_tokens():
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64))
    for name, priority in (("a", 0), ("b", 0), ("low", 3), ("c", 0)):
        h.add(name, [priority + 1] * 8, priority=priority, max_tokens=30)
    h.run_rounds(3)
    h.add("newcomer", [9], priority=3, max_tokens=2)
    h.run_out()
    preempted = {name: h.stream(name).finals[0].num_preempted for name in ("a", "b", "low", "c")}
    assert preempted["low"] > 0 and preempted["a"] == preempted["b"] == 0
    assert h.stream("low").tokens == expected_tokens([4] * 8, 30)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes():
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), max_num_batched_tokens=8)
    h.add("decoding", [1, 2], max_tokens=30)
    h.run_rounds(2)
    h.add("long", [3] * 40, max_tokens=3)
    before = len(h.stream("decoding").tokens)
    h.run_rounds(4)
    assert len(h.stream("decoding").tokens) == before + 4 and h.stream("long").tokens == []
    assert all(plan.num_tokens <= 8 for plan in h.runner.plans)
    h.run_out()
    assert h.stream("long").tokens == expected_tokens([3] * 40, 3)


def test_a_preempted_request_gets_a_prefix_hit_in_its_own_blocks():
    h = Harness(FakeRunner(num_blocks=7, block_size=4, max_model_len=28))
    h.add("short", [1] * 8, max_tokens=8)
    h.add("long", [2] * 8, max_tokens=16)
    h.run_out()
    assert h.stream("long").finals[0].num_preempted == 1 and h.engine.kv.hit_tokens == 12
    assert h.stream("long").tokens == expected_tokens([2] * 8, 16)


def test_without_prefix_caching_all_choices_compute_the_prompt_at_once():
    h = Harness(enable_prefix_caching=False)
    h.add("g", list(range(1, 10)), n=3, max_tokens=3)
    h.run_rounds()
    assert len(h.engine.scheduler.running) == 3
    h.run_out()
    assert h.engine.kv.hit_tokens == 0 and h.stream("g", 2).tokens == expected_tokens(list(range(1, 10)), 3)


def test_a_request_that_waits_for_an_equal_prompt_goes_on_when_that_one_is_cancelled():
    h = Harness(max_num_batched_tokens=8)
    h.add("first", [7] * 20, max_tokens=3)
    h.add("second", [7] * 20, max_tokens=3)
    h.run_rounds()
    h.send(m.CancelRequest("first"))
    h.run_out()
    assert h.stream("second").tokens == expected_tokens([7] * 20, 3)


@pytest.mark.parametrize(("step_s", "second"), [(1.0, int(64 * STRETCH)), (0.001, 1024)])
def test_the_second_step_is_as_long_as_the_cost_of_prompt_tokens_allows(step_s, second):
    h = Harness(FakeRunner(num_blocks=1024, max_model_len=2000), max_num_batched_tokens=1024, max_step_ms=100.0)
    h.runner.step_s = step_s
    h.add("long", [1] * 1500, max_tokens=1)
    h.run_out()
    sizes = [plan.num_tokens for plan in h.runner.plans]
    assert sizes[0] == 64 and sizes[1] == second


class CountingRequest(request.Request):
    """Counts every read of an attribute of a request."""

    looks: Counter = Counter()

    def __getattribute__(self, name):
        CountingRequest.looks[name] += 1
        return super().__getattribute__(name)


def looks_of_six_steps(waiting: int, lacking: str) -> int:
    """Return the number of attribute reads. Four requests run; the others lack a place in the batch, or KV blocks."""
    runner = FakeRunner(num_blocks=36, max_model_len=128)
    h = Harness(runner, max_num_seqs=4 if lacking == "places" else 8, max_step_ms=60_000.0)
    for i in range(4):
        h.add(f"r{i}", [i + 1] * 20, max_tokens=14)
    for _ in range(4):
        h.engine.run_once(block=False)
    for i in range(waiting):
        h.add(f"w{i}", [5] * 100, n=1 + i % 2)
    h.engine.run_once(block=False)
    CountingRequest.looks.clear()
    for _ in range(6):
        h.engine.run_once(block=False)
    looks = CountingRequest.looks.total()
    assert len(h.engine.scheduler.waiting) == waiting + waiting // 2 and len(h.engine.scheduler.running) == 4
    return looks


@pytest.mark.parametrize("lacking", ["places", "room"])
def test_the_host_cost_of_a_step_does_not_depend_on_the_number_of_waiting_requests(monkeypatch, lacking):
    monkeypatch.setattr(admission, "Request", CountingRequest)
    few, many = looks_of_six_steps(10, lacking), looks_of_six_steps(5000, lacking)
    assert few == many > 0


def test_the_cost_of_aborting_a_waiting_request_does_not_depend_on_their_number(monkeypatch):
    monkeypatch.setattr(admission, "Request", CountingRequest)
    costs = []
    for waiting in (100, 2000):
        h = Harness(FakeRunner(num_blocks=128))
        for i in range(waiting + 4):
            h.add(f"r{i}", [i % 900 + 1], max_tokens=60)
        h.engine.run_once(block=False)
        CountingRequest.looks.clear()
        computed = h.runner.computed_tokens
        h.send(m.Call(1, m.PauseArgs(mode="abort")))
        h.engine.run_once(block=False)
        h.engine.run_once(block=False)
        assert h.status()["is_paused"] and h.runner.computed_tokens == computed
        costs.append(CountingRequest.looks.total() / waiting)
    assert costs[1] < costs[0] * 1.5
