"""The time between tokens of tenant B while the adapter of tenant A is paused and loaded on the same server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.adapter_calls import load_adapter, pause_adapter, resume_adapter
from benchmarks.lib.client import Client, Stream
from benchmarks.lib.serving_stats import spread
from benchmarks.lib.timeline import StreamLog
from benchmarks.lib.workload import completion, prompt_ids

QUIET, ALONE = "both decode", "A is paused"  # phases in which nothing happens
PAUSE, LOAD, RESUME, LIVE = "pause of A", "load of A, paused", "resume of A", "load of A, running"
MAX_TOKENS = 3000


@dataclass
class Phases:
    """Windows of time of each phase, by its name, in order. Times are time.perf_counter() seconds."""

    windows: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def during(self, name: str, work: Awaitable[None]) -> None:
        start = time.perf_counter()
        await work
        self.windows.setdefault(name, []).append((start, time.perf_counter()))


@dataclass(frozen=True)
class PhaseGaps:
    """Times between tokens of B's streams in one phase, in seconds. lasted_s: length of each window of the phase."""

    phase: str
    gaps: tuple[float, ...]
    lasted_s: tuple[float, ...]

    @property
    def is_quiet(self) -> bool:
        return self.phase in (QUIET, ALONE)

    @property
    def took_s(self) -> float:
        """Median time of the call that the phase is about."""
        return median(self.lasted_s)

    @property
    def median(self) -> float:
        return spread(self.gaps).at[50]

    @property
    def p99(self) -> float:
        return spread(self.gaps).at[99]

    @property
    def longest(self) -> float:
        return max(self.gaps, default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median, "p99": self.p99, "longest": self.longest, "took_s": self.took_s}


def gaps_by_phase(logs: Sequence[StreamLog], phases: Phases) -> list[PhaseGaps]:
    """Sort the times between tokens into phases. A gap that overlaps a pause, load or resume counts for that phase. A
    gap counts as quiet only if the whole gap is in a quiet phase."""
    pairs = [(a.at, b.at) for log in logs for a, b in pairwise(log.tokens)]
    found = []
    for name, windows in phases.windows.items():
        if name in (QUIET, ALONE):
            gaps = [b - a for a, b in pairs if any(start <= a and b <= end for start, end in windows)]
        else:
            gaps = [b - a for a, b in pairs if any(b > start and a < end for start, end in windows)]
        found.append(PhaseGaps(name, tuple(gaps), tuple(end - start for start, end in windows)))
    return found


def vacuous(a: Sequence[StreamLog], b: Sequence[StreamLog], phases: Phases, scoped: bool) -> list[str]:
    """Return why a measurement proves nothing: a stream ended, B did not decode, or A did not do what its phases say.
    Only a scoped server labels A's tokens with the adapter_epoch."""
    errors = [f"{log.request_id} ended: {log.error or log.reason}" for log in (*a, *b) if log.error or log.finals]
    for name in (QUIET, ALONE):
        for start, end in phases.windows.get(name, ()):
            if not all(log.tokens_between(start, end) for log in b):
                errors.append(f"phase {name!r}: a stream of B has no token; raise --quiet-s")
    if not scoped:
        return errors
    for start, end in phases.windows[ALONE]:
        # In the first half, tokens of the last step may still be on their way.
        if sum(log.tokens_between((start + end) / 2, end) for log in a):
            errors.append("A got tokens while A was paused")
    loads = len(phases.windows[LOAD]) + len(phases.windows[LIVE])
    for log in a:
        epochs = {span["adapter_epoch"] for event in log.tokens for span in event.weight_versions}
        if len(epochs) != loads + 1:
            errors.append(f"{log.request_id} has tokens of {len(epochs)} adapter epochs after {loads} loads")
    return errors


@dataclass(frozen=True)
class Tenants:
    """``streams`` streams, half of them of tenant A, half of tenant B. folders: versions of A's adapter, which are
    loaded in turn. quiet_s: length of the quiet phases. scoped: the server can pause one adapter."""

    names: tuple[str, str]
    folders: Sequence[Path]
    streams: int
    prompt: int
    quiet_s: float
    cycles: int
    scoped: bool

    async def run(self, client: Client, seed: str) -> tuple[list[PhaseGaps], list[str]]:
        """Return B's gaps by phase, and errors. Raises ServerError if a call is refused."""
        streams = [await self._start(client, seed, index) for index in range(self.streams)]
        try:
            await asyncio.gather(*(stream.wait_tokens(2) for stream in streams))
            phases = Phases()
            for cycle in range(self.cycles):
                await self._cycle(client, phases, cycle)
            await phases.during(QUIET, asyncio.sleep(self.quiet_s))
            a, b = ([stream.log for stream in streams[half::2]] for half in range(2))
            return gaps_by_phase(b, phases), vacuous(a, b, phases, self.scoped)
        finally:
            for stream in streams:
                stream.cancel()

    async def _start(self, client: Client, seed: str, index: int) -> Stream:
        body = completion(self.names[index % 2], prompt_ids(seed, index, self.prompt), MAX_TOKENS)
        return await client.stream("/v1/completions", body, f"{seed}-{index}")

    async def _cycle(self, client: Client, phases: Phases, cycle: int) -> None:
        name = self.names[0]
        paused, live = (self.folders[(2 * cycle + step) % len(self.folders)] for step in range(2))
        await phases.during(QUIET, asyncio.sleep(self.quiet_s))
        if self.scoped:
            await phases.during(PAUSE, pause_adapter(client, name))
            await phases.during(ALONE, asyncio.sleep(self.quiet_s))
            await phases.during(LOAD, load_adapter(client, name, paused, in_place=True))
            await phases.during(RESUME, resume_adapter(client, name))
            await phases.during(QUIET, asyncio.sleep(self.quiet_s))
        await phases.during(LIVE, load_adapter(client, name, live, in_place=True))
