"""The steps that are computed before the engine serves requests."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fastdeploy.core.plan import StepPlan, StepResult
from fastdeploy.scheduler.step_cost import StepCost, chunk_keys
from fastdeploy.scheduler.warm_up import warm_up
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness
from support.timed_machine import Machine, TimedRunner, chunk, decodes, warmed_up


@pytest.mark.parametrize("max_num_seqs", [4, 64])
def test_the_warm_up_measures_the_cost_of_a_step(max_num_seqs):
    machine = Machine(key_s=1e-6)
    cost = warmed_up(machine, max_num_seqs).cost
    for rows in (1, 4, 16, 32, 100, 128):
        assert cost.cost(rows, 1, chunk_keys(500, rows)) == pytest.approx(machine.step_s([chunk(500, rows)]), rel=0.1)
        assert cost.cost(rows, rows, rows * chunk_keys(100, 1)) == pytest.approx(machine.step_s(decodes(rows)), rel=0.1)


class ColdRunner(TimedRunner):
    """A runner whose first step reads the weights from a disk."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult(plan.step_id, result.sampled, result.elapsed_s + 5.0 * (len(self.plans) == 1))


def test_the_first_step_of_a_process_is_not_measured():
    cost = StepCost()
    warm_up(cast(Any, ColdRunner(Machine())), cost, 16, 2048)
    assert cost.cost(1) < 0.1


@pytest.mark.parametrize("slow", [1, 10, 1000])
def test_the_warm_up_takes_some_seconds_at_most_and_some_steps_where_they_are_long(slow):
    machine = Machine(0.02 * slow, 0.001 * slow, sampled_s=0.0003 * slow)
    runner = TimedRunner(machine)
    warm_up(cast(Any, runner), StepCost(), 64, 2048)
    seconds = [machine.step_s(plan.chunks) for plan in runner.plans]
    assert sum(seconds) < 5.0 or len(seconds) <= 4


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 128])
@pytest.mark.parametrize("max_tokens", [1, 3, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 300])
def test_warm_up_stays_within_the_limits_of_the_settings(max_model_len, max_tokens, max_num_seqs):
    blocks = -(-max_model_len // 4)
    runner = FakeRunner(num_blocks=blocks, max_model_len=max_model_len, vocab=7)
    warm_up(runner, StepCost(), max_num_seqs, max_tokens)
    for plan in runner.plans:
        assert 1 <= plan.num_tokens <= max_tokens
        assert len(plan.chunks) <= max_num_seqs
        assert all(block < blocks for chunk in plan.chunks for block in chunk.blocks)
        assert max(plan.chunks[0].token_ids) < 7


def test_requests_after_the_warm_up_are_computed_from_their_own_kv():
    """The fake runner refuses a step whose context is not the sequence's own."""
    harness = Harness(FakeRunner(num_blocks=40, max_model_len=128))
    harness.engine.scheduler.pacer.warm_up(harness.runner, 4)
    harness.add("r", list(range(20)), max_tokens=5)
    harness.run_out()
    assert harness.stream("r").tokens == expected_tokens(list(range(20)), 5)
    harness.engine.lifecycle.check_integrity()
