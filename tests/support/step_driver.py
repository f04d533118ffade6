"""Plays the scheduler for a ModelRunner: hand-made step plans whose block tables are neither ordered nor adjacent."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import BlockCopy, NonFinite, ScheduledChunk, StepPlan
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, logprobs=0, max_tokens=64)


@dataclass
class Sequence:
    """One choice: ``ids`` is the prompt and the output, ``computed`` how many of them are in the KV cache. non_finite:
    set when a step could draw nothing for it; it runs no further."""

    name: str
    ids: list[int]
    sampling: SamplingParams = GREEDY
    choice: int = 0
    banned: tuple[int, ...] = ()
    computed: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))
    prompt_len: int = 0
    logprobs: list[Logprob | None] = field(default_factory=list)
    non_finite: NonFinite | None = None

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]

    @property
    def trace(self) -> tuple[list[int], list[Logprob | None]]:
        """What a test compares bit for bit."""
        return self.output, self.logprobs


class Driver:
    """Owns the blocks of one runner. ``step`` computes up to ``chunk`` tokens of each sequence it is given."""

    def __init__(self, runner: ModelRunner, seed: int = 0):
        self.runner = runner
        self.free = np.random.default_rng(seed).permutation(runner.info.num_blocks).tolist()
        self.steps = 0

    def step(self, sequences: list[Sequence], chunk: int | None = None, copies: list[BlockCopy] | None = None) -> None:
        chunks = [self.chunk(s, chunk) for s in sequences]
        plan = StepPlan(self.steps, chunks, copies or [])
        result = self.runner.execute(plan)
        assert result.step_id == self.steps and len(result.sampled) == len(chunks)
        self.steps += 1
        for sequence, scheduled, sampled in zip(sequences, chunks, result.sampled, strict=True):
            sequence.computed += len(scheduled.token_ids)
            assert (sampled is not None) == scheduled.sample
            if isinstance(sampled, NonFinite):
                sequence.non_finite = sampled
            elif sampled is not None:
                sequence.ids.append(sampled.token_id)
                sequence.logprobs.append(sampled.logprob)

    def generate(self, sequences: list[Sequence], count: int, chunk: int | None = None) -> list[Sequence]:
        """Run all of them together until each has ``count`` output tokens, or a row that is not finite; then give their
        blocks back."""
        while todo := [s for s in sequences if len(s.output) < count and s.non_finite is None]:
            self.step(todo, chunk)
        for sequence in sequences:
            self.release(sequence)
        return sequences

    def release(self, sequence: Sequence) -> None:
        """What a preemption does: the blocks go back, everything is to be computed again."""
        self.free[:0] = sequence.table
        sequence.table, sequence.computed = array("i"), 0

    def chunk(self, s: Sequence, limit: int | None) -> ScheduledChunk:
        end = min(len(s.ids), s.computed + (limit or len(s.ids)))
        while len(s.table) * self.runner.info.block_size < end:
            s.table.append(self.free.pop())
        return ScheduledChunk(
            key=(s.name, s.choice),
            token_ids=s.ids[s.computed : end],
            start=s.computed,
            block_table=s.table,
            sample=end == len(s.ids),
            sampling=s.sampling,
            all_token_ids=s.ids,
            num_prompt_tokens=s.prompt_len,
            banned=s.banned,
        )


def fresh(sequence: Sequence, **changes: object) -> Sequence:
    """The same request, not yet begun."""
    prompt = sequence.ids[: sequence.prompt_len]
    return replace(sequence, ids=list(prompt), computed=0, table=array("i"), logprobs=[], prompt_len=0, **changes)


def stage(runner: ModelRunner, folder: Path | str, partial: bool = False, in_place: bool = False) -> Any:
    """Stage a whole folder: what ``commit`` takes."""
    staging = runner.begin_update(partial, in_place)
    staging.add(FolderSource(str(folder)), {})
    return staging.finish()


def update(runner: ModelRunner, folder: Path | str, partial: bool = False, in_place: bool = False) -> None:
    runner.commit(stage(runner, folder, partial, in_place))
