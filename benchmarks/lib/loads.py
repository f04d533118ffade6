"""The loads that engines are compared under: what is sent, what is measured, and which bound of the machine applies.

Every run has random prompts of its own, the same for all engines, so that no prefix cache helps but within a group.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from benchmarks.lib.client import Client
from benchmarks.lib.roofline import Machine, Shape, decode_share, group_share, prefill_share
from benchmarks.lib.serving_stats import summarize
from benchmarks.lib.timeline import StreamLog
from benchmarks.lib.workload import closed_loop, completion, prompt_ids

TIMEOUT_S = 600.0
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Figures:
    """One run. Times in seconds; None where the load does not show it.

    seconds: from the first request sent to the last one ended. token_s: time between the tokens of a stream, its mean,
    median over streams; None where the tokens of most streams came all at once, as they do to a client that is busy.
    prefilled_s: from the first request sent to the last first token.
    """

    seconds: float
    tokens: int
    tokens_per_s: float
    first_mean_s: float | None = None
    first_p50_s: float | None = None
    first_p99_s: float | None = None
    token_s: float | None = None
    prefilled_s: float | None = None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Load(ABC):
    """``at_once`` clients in a closed loop send ``requests`` in all, each of ``prompt`` random ids, and get ``output``
    tokens. ``bound`` says what ``share`` is a part of."""

    name: str
    at_once: int
    prompt: int
    output: int
    requests: int

    bound = "read bandwidth"

    @abstractmethod
    async def run(self, client: Client, model: str, seed: str) -> Figures:
        """Send it all. A request that fails is an error in the figures, not an exception, unless the server cannot
        be reached."""

    @abstractmethod
    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        """How much of what the machine could do was used, from 0 to about 1; None where the figures do not show it."""

    def warm_up(self) -> Load:
        """One short round of it."""
        return type(self)(self.name, self.at_once, self.prompt, WARM_UP_TOKENS, self.at_once)


class Streams(Load):
    """Greedy and streamed. Its bound is that of decoding."""

    async def run(self, client: Client, model: str, seed: str) -> Figures:
        async def one(index: int) -> StreamLog:
            body = completion(model, prompt_ids(seed, index, self.prompt), self.output)
            stream = await client.stream("/v1/completions", body, f"{seed}-{index}")
            return await stream.wait_closed()

        logs = await closed_loop(one, self.requests, self.at_once)
        stats = summarize(logs)
        if stats.failed:
            return Figures(stats.duration_s, stats.output_tokens, stats.tokens_per_s, errors=stats.errors)
        start = min(log.sent_at for log in logs)
        return Figures(
            stats.duration_s,
            stats.output_tokens,
            stats.tokens_per_s,
            stats.ttft.mean,
            stats.ttft.at[50],
            stats.ttft.at[99],
            stats.tpot.at[50] or None,
            max(log.tokens[0].at for log in logs) - start,
        )

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        return None if figures.token_s is None else decode_share(shape, machine, figures.token_s)


class Prefill(Streams):
    """Streams of long prompts, all sent at the start (``requests`` = ``at_once``). Its bound is that of prefill."""

    bound = "matrix rate"

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float:
        assert figures.prefilled_s is not None and self.requests == self.at_once
        return prefill_share(shape, machine, self.requests, self.prompt, figures.prefilled_s)


class Groups(Load):
    """``SAMPLES`` samples of each prompt at temperature 1, as a trainer asks for them: not streamed, and a client goes
    on when its group is complete. One request with n samples."""

    SAMPLES = 8
    bound = "least time"

    async def run(self, client: Client, model: str, seed: str) -> Figures:
        errors: list[str] = []

        async def call(body: dict, expected: int) -> int:
            reply = await client.call("POST", "/v1/completions", body, TIMEOUT_S)
            made = reply.body["usage"]["completion_tokens"] if reply.status == 200 else 0
            if made != expected:
                errors.append(f"HTTP {reply.status}, {made} of {expected} tokens: {str(reply.body)[:200]}")
            return made

        async def group(index: int) -> int:
            body = completion(model, prompt_ids(seed, index, self.prompt), self.output)
            body |= {"temperature": 1.0, "stream": False}
            return sum(await asyncio.gather(*(call(*request) for request in self.requests_of(body))))

        start = time.perf_counter()
        tokens = sum(await closed_loop(group, self.requests, self.at_once))
        seconds = time.perf_counter() - start
        return Figures(seconds, tokens, tokens / seconds, errors=tuple(sorted(set(errors))))

    def requests_of(self, body: dict) -> list[tuple[dict, int]]:
        """The bodies that a group is sent as, each with the tokens that it must bring."""
        return [(body | {"n": self.SAMPLES}, self.SAMPLES * self.output)]

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float:
        return group_share(shape, machine, self.requests, self.at_once, self.prompt, self.output, figures.seconds)


class RepeatedGroups(Groups):
    """The same, as verl and slime send it: as many requests with one prompt, at once."""

    def requests_of(self, body: dict) -> list[tuple[dict, int]]:
        return [(body, self.output)] * self.SAMPLES


LOADS: dict[str, Load] = {
    load.name: load
    for load in (
        Streams("1", 1, 32, 64, 2),
        Streams("8", 8, 32, 64, 16),
        Streams("32", 32, 32, 64, 32),
        Prefill("prefill", 8, 512, 32, 8),
        Groups("groups", 4, 512, 64, 8),
        RepeatedGroups("groups-as-requests", 4, 512, 64, 8),
    )
}
