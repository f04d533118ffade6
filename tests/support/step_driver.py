"""Step plans for a ModelRunner without a scheduler, with blocks that are neither ordered nor adjacent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import BlockCopy, NewSequence, NoneAllowed, NonFinite, ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.core.weight_source import FolderSource, Source
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.sequences import Draws
from support.specs import prompt

GREEDY = SamplingParams(temperature=0.0, logprobs=0, max_tokens=64)


@dataclass
class Sequence:
    """One choice. ids: prompt and output. computed: how many of them are in the KV cache. non_finite: set when the
    logits of a step were not finite; the sequence ends there. number: the runner's number of the sequence. told: how
    many tokens and blocks the runner knows. served: the weights that compute it. rows_from: position of the first token
    whose row the sequence asks for; -1 = it asks for none. rows: those that it has."""

    name: str
    ids: list[int]
    sampling: SamplingParams = GREEDY
    choice: int = 0
    banned: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    computed: int = 0
    table: list[int] = field(default_factory=list)
    prompt_len: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    non_finite: NonFinite | NoneAllowed | None = None
    number: int | None = None
    told: tuple[int, int] = (0, 0)
    served: ServedWeights = ServedWeights()
    rows_from: int = -1
    rows: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]

    @property
    def trace(self) -> tuple[list[int], list[Logprob | None]]:
        """The output and its logprobs, which tests compare bit for bit."""
        return self.output, self.logprobs


class Driver:
    """Owns the blocks of one runner. ``step`` computes up to ``chunk`` tokens of each sequence it is given, and behind
    the last known token what ``guess`` drafts."""

    def __init__(self, runner: ModelRunner, seed: int = 0, guess: Callable[[Sequence], list[int]] = lambda _: []):
        self.runner, self.guess = runner, guess
        self.free = np.random.default_rng(seed).permutation(runner.info.num_blocks).tolist()
        self.steps = 0
        self._numbers = 0

    def step(self, sequences: list[Sequence], chunk: int | None = None, copies: list[BlockCopy] | None = None) -> None:
        sequences = sorted(sequences, key=lambda s: s.served.adapter)  # as the scheduler does
        chunks = [self.chunk(s, chunk) for s in sequences]
        plan = StepPlan(self.steps, chunks, copies or [])
        result = self.runner.execute(plan)
        assert result.step_id == self.steps and len(result.sampled) == len(chunks)
        self.steps += 1
        for i, (sequence, scheduled, sampled) in enumerate(zip(sequences, chunks, result.sampled, strict=True)):
            sequence.rows += result.routed.get(i, b"")
            sequence.computed += scheduled.num_known
            assert (sampled is not None) == scheduled.sample
            if isinstance(sampled, NonFinite | NoneAllowed):
                sequence.non_finite = sampled
            elif sampled is not None:
                accepted = len(sampled.token_ids) - 1
                assert accepted <= scheduled.drafted
                sequence.ids += sampled.token_ids
                sequence.computed += accepted
                sequence.told = sequence.told[0] + accepted, sequence.told[1]
                sequence.logprobs += sampled.logprobs

    def generate(self, sequences: list[Sequence], count: int, chunk: int | None = None) -> list[Sequence]:
        """Run sequences together until each has ``count`` output tokens or is non_finite, and free their blocks."""
        while todo := [s for s in sequences if len(s.output) < count and s.non_finite is None]:
            self.step(todo, chunk)
        for sequence in sequences:
            self.release(sequence)
        return sequences

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of the sequence, as a preemption does."""
        self.free[:0] = sequence.table
        sequence.table, sequence.computed, sequence.number = [], 0, None

    def chunk(self, s: Sequence, limit: int | None) -> ScheduledChunk:
        end = min(len(s.ids), s.computed + (limit or len(s.ids)))
        drafts = self.guess(s) if end == len(s.ids) else []
        while len(s.table) * self.runner.info.block_size < end + len(drafts):
            s.table.append(self.free.pop())
        new = None
        if s.number is None:
            s.number, s.told = self._numbers, (0, 0)
            self._numbers += 1
            new = NewSequence((s.name, s.choice), s.sampling, s.prompt_len, s.banned, len(s.ids) + 1000, s.ends)
        tokens, blocks = s.told
        s.told = len(s.ids), len(s.table)
        start, sample = s.computed, end == len(s.ids)
        unsent, count = s.ids[tokens:] + drafts, end - start + len(drafts)
        routed_from = -1
        if (info := self.runner.info.experts) is not None and sample and s.rows_from >= 0:
            routed_from = s.rows_from + len(s.rows) // info.row_bytes
        return ScheduledChunk(
            s.number, start, count, sample, s.served, unsent, s.table[blocks:], new,
            drafted=len(drafts), routed_from=routed_from,
        )  # fmt: skip


def fresh(sequence: Sequence, **changes: object) -> Sequence:
    """Return the same request, not yet begun."""
    ids = sequence.ids[: sequence.prompt_len]
    return replace(
        sequence, ids=ids, computed=0, table=[], logprobs=[], prompt_len=0, number=None, rows=bytearray(), **changes
    )


def draws_of(rows: list[tuple[list[int], int, SamplingParams, tuple[int, ...]]]) -> Draws:
    """Return the input of a sampler. rows: known token ids, all of one length; prompt length; settings; bans."""
    new = [NewSequence(("r", i), params, count, banned, 1000) for i, (_, count, params, banned) in enumerate(rows)]
    tokens = np.array([ids for ids, *_ in rows], np.int32)
    return Draws(new, np.full(len(rows), tokens.shape[1]), tokens, np.arange(len(rows)))


def load(runner: Runner, number: int, folder: Path) -> ServedWeights:
    """Read an adapter and commit it under ``number``. Returns the label of a sequence that it computes."""
    staging = runner.begin_adapter()
    staging.read(str(folder))
    runner.commit_adapter(number, staging.finish())
    return ServedWeights(adapter=number)


def outputs(runner: ModelRunner) -> list:
    """Return the tokens and logprobs that the runner generates for two fixed prompts."""
    sequences = [Sequence(f"s{n}", prompt(n, 211)) for n in (3, 40)]
    return [s.trace for s in Driver(runner).generate(sequences, 6)]


def stage(runner: ModelRunner, *sources: Source | Path, partial: bool = False) -> Any:
    """Stage the sources, of which a Path is a folder. Returns the argument of ``commit``."""
    staging = runner.begin_update(partial)
    for source in sources:
        staging.add(FolderSource(str(source)) if isinstance(source, Path) else source, {})
    return staging.finish().weights


def update(runner: ModelRunner, *sources: Source | Path, partial: bool = False) -> None:
    """Stage the sources and commit them."""
    runner.commit(stage(runner, *sources, partial=partial))


def sleep(runner: Runner, *tags: str, discard: bool = False) -> int:
    """Write the weights if they are kept, and give the memory back. Returns its bytes."""
    written = runner.begin_sleep(tags, discard)
    if written is not None:
        written.run()
    return runner.sleep(tags, written)


def wake(runner: Runner, *tags: str) -> None:
    """Read the weights if a file has them, and take the memory again."""
    read = runner.begin_wake(tags)
    if read is not None:
        read.run()
    runner.wake(tags, read)
