"""Number of prompt tokens in a step, on machines whose steps take the time of a formula."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core import roofline
from fastdeploy.core.plan import StepPlan, StepResult
from fastdeploy.scheduler.pacer import (
    FIRST_GUESS,
    LARGE_STEP_S,
    LARGE_STEPS,
    LEAST,
    LONGEST_STEP_S,
    PROBE_STEPS,
    StepPacer,
)
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness
from support.search import examples
from support.timed_machine import Machine, chunk, decodes, warmed_up

PROMISED = 1.5  # times the step of the running sequences alone


@dataclass(eq=False)
class Prompt:
    """What the pacer reads of a request."""

    num_tokens: int
    arrival: float = 0.0
    first_token_at: float = 0.0
    num_computed: int = 0
    num_output_tokens: int = 0


@dataclass
class Simulation:
    """Streams that run for ever, and prompts behind them, on a machine."""

    machine: Machine
    pacer: StepPacer
    running: list[Prompt] = field(default_factory=list)
    now: float = 100.0

    def step(self, prompts: list[Prompt]) -> float:
        """Compute a step, and return its seconds."""
        chunks = {r: chunk(r.num_computed, 1) for r in self.running}
        budget = self.pacer.budget(cast(Any, self.running))
        for prompt in prompts:
            if (missing := prompt.num_tokens - prompt.num_computed) and budget.admits(prompt):
                count = budget.take(prompt)
                assert 1 <= count <= missing
                chunks[prompt] = chunk(prompt.num_computed, count, count == missing)
        for request, done in chunks.items():
            request.num_computed += done.count
            request.num_tokens = max(request.num_tokens, request.num_computed)
        seconds = self.machine.step_s(chunks.values())
        self.pacer.observe(chunks.values(), seconds)
        self.now += seconds
        return seconds

    def steps(self, prompts: list[Prompt]) -> list[float]:
        """Compute all prompts, and return the seconds of each step."""
        found = []
        while any(prompt.num_computed < prompt.num_tokens for prompt in prompts):
            found.append(self.step(prompts))
            assert len(found) < 20_000, "a prompt makes no progress"
        return found


def simulate(machine: Machine, streams: int, context: int = 100, max_step_s: float | None = None) -> Simulation:
    """Return a simulation with streams that have run for a while, and a pacer that knows the machine."""
    pacer = warmed_up(machine, max_step_s=max_step_s)
    simulation = Simulation(machine, pacer, [Prompt(1, 1.0, 2.0, context) for _ in range(streams)])
    for _ in range(30 if streams else 0):
        simulation.step([])
    return simulation


machines = st.builds(
    Machine, st.floats(0.005, 0.1), st.floats(0.00002, 0.005), st.sampled_from([0.0, 1e-8, 1e-7]), st.floats(0.0, 0.001)
)


@given(machines, st.integers(1, 64), st.lists(st.integers(1, 1000), min_size=1, max_size=4))
@examples(20)
def test_a_step_with_prompts_takes_at_most_half_more_than_one_without(machine, streams, lengths):
    simulation = simulate(machine, streams)
    prompts = [Prompt(length, simulation.now) for length in lengths]
    while any(prompt.num_computed < prompt.num_tokens for prompt in prompts):
        running = [chunk(r.num_computed, 1) for r in simulation.running]
        start = next(prompt.num_computed for prompt in prompts if prompt.num_computed < prompt.num_tokens)
        # LEAST rows are computed, even where they cost more.
        allowed = max(PROMISED * machine.step_s(running), machine.step_s([*running, chunk(start, LEAST)]))
        assert simulation.step(prompts) <= 1.05 * allowed


@given(machines, st.integers(1, 64), st.integers(100, 3000))
@examples(20)
def test_prompts_get_most_of_what_the_stretch_allows(machine, streams, length):
    """The first token comes as soon as the others allow it."""
    simulation = simulate(machine, streams)
    alone_s = simulation.step([])
    *steps, _ = simulation.steps([Prompt(length, simulation.now) for _ in range(2)])
    assert sum(steps) >= 1.25 * alone_s * len(steps) or len(steps) < 10


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("slow", [0.33, 0.5, 2.0, 3.0])
def test_a_machine_whose_speed_changes_keeps_the_ratio(slow, streams):
    simulation = simulate(Machine(), streams)
    length = 2000
    usual = len(simulation.steps([Prompt(length, simulation.now)]))
    simulation.machine = Machine(0.02 * slow, 0.001 * slow, sampled_s=0.0003 * slow)
    steps = simulation.steps([Prompt(length, simulation.now)])
    assert len(steps) <= 1.4 * usual
    alone_s = simulation.machine.step_s(decodes(streams, simulation.running[0].num_tokens))
    assert sum(steps) <= PROMISED * alone_s * len(steps)
    assert max(steps[40:]) <= 1.2 * PROMISED * alone_s


def test_a_noisy_machine_keeps_the_ratio_and_computes_prompts():
    noise = random.Random(0)

    class Noisy(Machine):
        def step_s(self, chunks):
            return super().step_s(chunks) * noise.uniform(0.7, 1.3)

    usual = len(simulate(Machine(), 8).steps([Prompt(2000, 100.0)]))
    steps = simulate(Noisy(), 8).steps([Prompt(2000, 100.0)])
    assert len(steps) <= 1.6 * usual
    assert sum(steps) <= 1.1 * PROMISED * Machine().step_s(decodes(8)) * len(steps)


def test_one_slow_step_is_forgotten():
    simulation = simulate(Machine(), 8)
    before = simulation.steps([Prompt(1000, simulation.now)])
    simulation.pacer.observe(decodes(16), 20.0)
    after = simulation.steps([Prompt(1000, simulation.now)])
    assert len(after) <= 1.15 * len(before)


def test_prompts_that_came_with_the_streams_or_before_them_are_not_paced():
    simulation = simulate(Machine(), 8)
    arrivals = {"with": simulation.running[0].arrival + 0.1, "before": simulation.running[0].arrival - 50}
    for arrival in arrivals.values():
        assert LONGEST_STEP_S / 2 < simulation.step([Prompt(2000, arrival)]) <= 1.1 * LONGEST_STEP_S
    assert simulation.step([Prompt(2000, simulation.now)]) < LONGEST_STEP_S / 5


def test_a_begun_request_that_is_computed_again_is_not_paced():
    """As all are after an update with kv=recompute: the first that is ready must not slow the others down."""
    simulation = simulate(Machine(), 1)
    again = Prompt(2000, simulation.now, simulation.now, num_output_tokens=3)
    assert simulation.step([again]) > LONGEST_STEP_S / 2


def test_without_streams_a_step_takes_the_longest_time():
    simulation = simulate(Machine(), 0)
    *steps, _ = simulation.steps([Prompt(2000, simulation.now)])
    assert all(LONGEST_STEP_S / 2 < seconds <= 1.1 * LONGEST_STEP_S for seconds in steps)


@pytest.mark.parametrize("streams", [0, 8])
@pytest.mark.parametrize("memory_s", [0.1, 0.2, 0.4])
def test_prompts_that_are_not_paced_get_most_of_a_step_also_where_the_weights_take_long_to_read(memory_s, streams):
    machine = Machine(memory_s, memory_s / 50)
    simulation = simulate(machine, streams)
    *steps, _ = simulation.steps([Prompt(4000, 1.0) for _ in range(2)])
    longest_s = min(LARGE_STEPS * machine.step_s(decodes(1)), LARGE_STEP_S)
    assert longest_s / 2 < sum(steps[5:]) / len(steps[5:]) and max(steps) <= 1.1 * longest_s


def test_the_setting_replaces_the_rules():
    simulation = simulate(Machine(), 8, max_step_s=0.1)
    for arrival in (0.0, simulation.now):
        assert simulation.step([Prompt(2000, arrival)]) == pytest.approx(0.1, rel=0.1)


def test_the_oldest_prompt_goes_first_and_the_rest_of_the_step_is_shared():
    simulation = simulate(Machine(), 8)
    short, long, last = (Prompt(length, simulation.now) for length in (3, 300, 50))
    simulation.step([short, long, last])
    assert short.num_computed == 3 and long.num_computed > 3 and last.num_computed == 0


def test_every_step_computes_a_part_of_a_prompt():
    """Also where no prompt token is cheap enough."""
    simulation = simulate(Machine(memory_s=0.0001, row_s=0.01), 1)
    assert len(simulation.steps([Prompt(400, simulation.now)])) <= 1.1 * 400 / LEAST


def test_decodes_that_fill_a_step_leave_no_room():
    pacer = StepPacer(300, 0.01)
    pacer.observe(decodes(64), 100.0)
    prompt = Prompt(100)
    budget = pacer.budget(cast(Any, [Prompt(1)] * 298))
    assert budget.admits(prompt) and budget.take(prompt) == 2 and not budget.admits(prompt)


def test_the_first_step_is_small():
    assert StepPacer(2048).budget([]).take(Prompt(1000)) == FIRST_GUESS
    assert StepPacer(20).budget([]).take(Prompt(1000)) == 20


class TimedFakeRunner(FakeRunner):
    """A fake runner whose steps take the time that a machine needs."""

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        self.step_s = Machine().step_s(plan.chunks)
        return super().execute(plan, between_layers)


@pytest.mark.parametrize("came_later", [True, False])
def test_the_engine_paces_a_prompt_that_comes_while_a_request_runs(came_later):
    runner = TimedFakeRunner(num_blocks=400, max_model_len=1000)
    h = Harness(runner, max_num_batched_tokens=1024)
    h.engine.scheduler.pacer.cost = warmed_up(Machine()).cost
    h.add("stream", [1] * 10, max_tokens=200)
    h.run_rounds(20)
    first = len(runner.plans)
    h.add("prompt", list(range(600)), max_tokens=2, arrival=time.time() + 100 if came_later else 1.0)
    h.run_out()
    plans = runner.plans[first:]
    steps = [plan.num_tokens for plan in plans if any(chunk.count > 1 for chunk in plan.chunks)]
    if came_later:
        assert len(steps) > 600 / 30
        # Every now and then, a step shows what the stream alone takes.
        sizes = [plan.num_tokens for plan in plans[: len(steps)]]
        assert PROBE_STEPS <= sizes.index(1) <= PROBE_STEPS + 2
    else:
        assert len(steps) <= 4
    assert h.stream("stream").tokens == expected_tokens([1] * 10, 200)
    assert h.stream("prompt").tokens == expected_tokens(list(range(600)), 2)


def test_the_least_time_is_summed_over_the_steps_that_decode_alone():
    pacer = StepPacer(2048)
    pacer.observe(decodes(2, start=100), 0.5)
    assert pacer.decode_steps.seconds == 0, "the machine was not measured"
    pacer.decode_steps.roofline = roofline.StepRoofline(roofline.Machine(1e9, 1e11), 500_000, 1_000_000, 1000)
    pacer.observe(decodes(2, start=100), 0.5)
    pacer.observe([*decodes(2), chunk(0, 50)], 0.5)
    pacer.observe([chunk(7, 1, sample=False)], 0.5)
    assert pacer.decode_steps.seconds == 0.5
    assert pacer.decode_steps.least_s == pytest.approx((1_000_000 + 2 * 101 * 1000) / 1e9)
    before = pacer.decode_steps.least_s
    pacer.observe(decodes(2000, start=0), 0.5)
    assert pacer.decode_steps.least_s - before == pytest.approx(2 * 500_000 * 2000 / 1e11), "bound by arithmetic"
