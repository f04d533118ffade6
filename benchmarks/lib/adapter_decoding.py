"""Speed of decoding streams that use some number of distinct adapters: one round, and medians over rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.lib.client import Client
from benchmarks.lib.timeline import StreamLog, median_step
from benchmarks.lib.workload import completion, prompt_ids

PROBE_TOKENS = 12  # of each answer that `check_adapters` compares


def adapter_name(number: int) -> str:
    return f"adapter-{number}"


@dataclass(frozen=True)
class Round:
    """One round of ``streams`` streams. step_s: seconds between a stream's tokens while all streams decode: the mean of
    each stream, median over streams; 0 if a request failed, or the streams never decoded all at once."""

    streams: int
    step_s: float
    errors: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.step_s


@dataclass(frozen=True)
class Streams:
    """Greedy streams of ``prompt`` random ids and ``output`` tokens, all sent at once. base: name of the base model."""

    base: str
    count: int
    prompt: int
    output: int

    async def run(self, client: Client, adapters: int, seed: str) -> Round:
        """Run the streams with ``adapters`` distinct adapters in turn (0: the base model alone)."""
        streams = []
        for index in range(self.count):
            model = adapter_name(index % adapters) if adapters else self.base
            body = completion(model, prompt_ids(seed, index, self.prompt), self.output)
            streams.append(await client.stream("/v1/completions", body, f"{seed}-{index}"))
        return summarize(await asyncio.gather(*(stream.wait_closed() for stream in streams)), self.output)


def summarize(logs: Sequence[StreamLog], output: int) -> Round:
    bad = [log for log in logs if not log.ended_once or log.num_tokens != output]
    errors = {f"HTTP {log.status}, {log.num_tokens} of {output} tokens: {log.error}" for log in bad}
    if errors:
        return Round(len(logs), 0.0, tuple(sorted(errors)))
    start, end = max(log.tokens[0].at for log in logs), min(log.tokens[-1].at for log in logs)
    return Round(len(logs), median_step(logs, start, end))


async def check_adapters(client: Client, base: str, adapters: int) -> list[str]:
    """Return the errors that make a measurement vacuous: two of the models (base and adapters) that give the same
    answer to one prompt."""
    models = [base, *map(adapter_name, range(adapters))]

    async def answer(model: str) -> StreamLog:
        body = completion(model, prompt_ids("check", 0, 32), PROBE_TOKENS)
        return await (await client.stream("/v1/completions", body, model)).wait_closed()

    seen: dict[tuple[int, ...], str] = {}
    errors = []
    for log in await asyncio.gather(*map(answer, models)):
        ids, name = tuple(log.token_ids), log.request_id
        if len(ids) != PROBE_TOKENS:
            errors.append(f"{name}: HTTP {log.status}, {len(ids)} of {PROBE_TOKENS} tokens: {log.error}")
        elif ids in seen:
            errors.append(f"{name} answers as {seen[ids]} does")
        else:
            seen[ids] = name
    return errors


@dataclass(frozen=True)
class Rounds:
    """All rounds of one server with one number of adapters, in order. All have a step. Rounds with the same index of
    two servers were made one after the other, so that a slow minute of the machine affects both sides of a ratio."""

    rounds: tuple[Round, ...]

    @property
    def step_s(self) -> float:
        return median(found.step_s for found in self.rounds)

    @property
    def speeds(self) -> list[float]:
        return [found.tokens_per_s for found in self.rounds]

    @property
    def tokens_per_s(self) -> float:
        return median(self.speeds)

    def ratios(self, other: Rounds) -> list[float]:
        """Return the ratios of the speeds, this one over the other, round by round."""
        return [mine / theirs for mine, theirs in zip(self.speeds, other.speeds, strict=True)]

    def over(self, other: Rounds) -> float:
        """Return the median of the ratios."""
        return median(self.ratios(other))
