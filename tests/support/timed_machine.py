"""A machine whose steps take the time of a formula."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from fastdeploy.core.plan import ScheduledChunk, StepPlan, StepResult
from fastdeploy.core.runner import ModelInfo
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.pacer import StepPacer
from fastdeploy.scheduler.step_cost import step_work


@dataclass
class Machine:
    """Steps are bound by memory, then by arithmetic. sampled_s, key_s: what a sampled row and a key cost more."""

    memory_s: float = 0.02
    row_s: float = 0.001
    key_s: float = 0.0
    sampled_s: float = 0.0003

    def step_s(self, chunks: Collection[ScheduledChunk]) -> float:
        rows, sampled, keys = step_work(chunks)
        arithmetic_s = max(self.memory_s, rows * self.row_s) + rows * self.row_s / 4
        return arithmetic_s + sampled * self.sampled_s + keys * self.key_s


def chunk(start: int, count: int, sample: bool = True) -> ScheduledChunk:
    return ScheduledChunk(0, start, count, sample, ServedWeights(), [], [])


def decodes(count: int, start: int = 100) -> list[ScheduledChunk]:
    return [chunk(start, 1) for _ in range(count)]


class TimedRunner:
    """The part of a runner that the warm-up needs. Steps take the time that ``machine`` says."""

    def __init__(self, machine: Machine, max_model_len: int = 4096):
        self.machine, self.plans = machine, list[StepPlan]()
        self.info = ModelInfo("timed", "float32", 1000, max_model_len, (0,), 300, 16)

    def measure_roofline(self) -> None:
        return None

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(plan.step_id, [None for _ in plan.chunks], self.machine.step_s(plan.chunks))


def warmed_up(machine: Machine, max_num_seqs: int = 64, max_step_s: float | None = None) -> StepPacer:
    """Return a pacer after the warm-up on ``machine``."""
    pacer, runner = StepPacer(2048, max_step_s), TimedRunner(machine)
    pacer.warm_up(cast(Any, runner), max_num_seqs)
    return pacer
