"""The loads of a comparison: the requests, the measured figures, and the machine's bound that applies.

Every run has new random prompts, the same for all engines, so that a prefix cache helps within a group only.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.lib.roofline import Machine, Shape, decode_share, group_share, prefill_share
from fastdeploy.bench.client import Client
from fastdeploy.bench.stats import summarize
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import closed_loop, completion, prompt_ids

TIMEOUT_S = 600.0
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Figures:
    """Figures of one run. Times in seconds; None for a figure that the load does not have.

    seconds: from the first request sent to the last one ended. token_s: mean time between a stream's tokens, median
    over streams; None if the tokens of most streams arrived all at once, as at a busy client. prefilled_s: from the
    first request sent to the first token of the last stream.
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


def adapter_name(number: int) -> str:
    return f"adapter-{number}"


@dataclass(frozen=True)
class Load(ABC):
    """A closed loop of ``at_once`` clients with ``requests`` in total, each of ``prompt`` random ids and ``output``
    tokens. bound: name of the machine's limit that ``share`` refers to."""

    name: str
    at_once: int
    prompt: int
    output: int
    requests: int

    bound = "least time"

    @property
    def described(self) -> str:
        """What is sent, for the tables of docs/benchmarks.md."""
        streams = "1 stream" if self.at_once == 1 else f"{self.at_once} streams"
        return f"{streams}, {self.prompt} tokens in, {self.output} out"

    @abstractmethod
    async def run(self, client: Client, model: str, seed: str) -> Figures:
        """Send all requests. A failed request is an error in the figures; only an unreachable server raises."""

    @abstractmethod
    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        """Return the share of the bound that was used, from 0 to about 1; None if the figures do not have it."""

    def warm_up(self) -> Load:
        """Return a short load of the same kind."""
        return replace(self, output=WARM_UP_TOKENS, requests=self.at_once)


class Streams(Load):
    """Greedy streams, bounded by decoding."""

    async def run(self, client: Client, model: str, seed: str) -> Figures:
        async def one(index: int) -> StreamLog:
            body = completion(self.model_of(index, model), prompt_ids(seed, index, self.prompt), self.output)
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

    def model_of(self, index: int, model: str) -> str:
        """Return the name of the model that request ``index`` uses. model: the base model."""
        return model

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        return figures.token_s and decode_share(shape, machine, self.at_once, figures.token_s)


@dataclass(frozen=True)
class AdapterStreams(Streams):
    """Streams that use ``adapters`` distinct adapters in turn; 0: the base model alone. adapter_bytes: of one."""

    adapters: int = 0
    adapter_bytes: int = 0

    def model_of(self, index: int, model: str) -> str:
        return adapter_name(index % self.adapters) if self.adapters else model

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        extra = self.adapters * self.adapter_bytes
        return figures.token_s and decode_share(shape, machine, self.at_once, figures.token_s, extra)


class Long(Streams):
    """Greedy streams behind long prompts, which are the same in all rounds: the warm-up computes them, and later rounds
    find their KV in the prefix cache. Reading the KV is in the least time."""

    async def run(self, client: Client, model: str, seed: str) -> Figures:
        return await super().run(client, model, self.name)

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        kv = shape.kv_bytes(self.at_once * self.prompt)
        return figures.token_s and decode_share(shape, machine, self.at_once, figures.token_s, kv)


class Prefill(Streams):
    """Streams of long prompts, all sent at the start (``requests`` = ``at_once``), bounded by prefill."""

    bound = "matrix rate"

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        assert figures.prefilled_s is not None and self.requests == self.at_once
        return prefill_share(shape, machine, self.requests, self.prompt, figures.prefilled_s)


class Groups(Load):
    """Groups of ``SAMPLES`` samples of one prompt at temperature 1, as a trainer requests them: one request with n
    samples, not streamed. A client sends its next group when its last one is complete."""

    SAMPLES = 8

    @property
    def described(self) -> str:
        return f"{self.at_once} groups of {self.SAMPLES} samples of a {self.prompt}-token prompt, {self.output} out"

    async def run(self, client: Client, model: str, seed: str) -> Figures:
        errors: list[str] = []

        async def call(body: dict, samples: int) -> int:
            reply = await client.call("POST", "/v1/completions", body, TIMEOUT_S)
            choices = reply.body["choices"] if reply.status == 200 else []
            whole = sum(choice["finish_reason"] == "length" for choice in choices)  # llama.cpp's usage counts one only
            if whole != samples:
                errors.append(f"HTTP {reply.status}, {whole} of {samples} samples: {str(reply.body)[:200]}")
            return whole * self.output

        async def group(index: int) -> int:
            body = completion(model, prompt_ids(seed, index, self.prompt), self.output)
            body |= {"temperature": 1.0, "stream": False}
            return sum(await asyncio.gather(*(call(*request) for request in self.requests_of(body))))

        start = time.perf_counter()
        tokens = sum(await closed_loop(group, self.requests, self.at_once))
        seconds = time.perf_counter() - start
        return Figures(seconds, tokens, tokens / seconds, errors=tuple(sorted(set(errors))))

    def requests_of(self, body: dict) -> list[tuple[dict, int]]:
        """Return the request bodies of a group, each with its number of samples."""
        return [(body | {"n": self.SAMPLES}, self.SAMPLES)]

    def share(self, shape: Shape, machine: Machine, figures: Figures) -> float | None:
        counts = self.requests, self.at_once, self.SAMPLES
        return group_share(shape, machine, *counts, self.prompt, self.output, figures.seconds)


class RepeatedGroups(Groups):
    """Groups as verl and slime send them: ``SAMPLES`` requests with the same prompt, at once."""

    @property
    def described(self) -> str:
        return f"{super().described}, each sample a request"

    def requests_of(self, body: dict) -> list[tuple[dict, int]]:
        return [(body, 1)] * self.SAMPLES


DEFAULT_LOADS = (
    Streams("1", 1, 32, 64, 2),
    Streams("8", 8, 32, 64, 16),
    Streams("32", 32, 32, 64, 32),
    Prefill("prefill", 8, 512, 32, 8),
    Groups("groups", 4, 512, 64, 8),
    RepeatedGroups("groups-as-requests", 4, 512, 64, 8),
)
LONG = "long"
LOAD_NAMES = (*(load.name for load in DEFAULT_LOADS), LONG)


def loads_of(names: Sequence[str], context: int) -> list[Load]:
    """Return the loads of these names. context: tokens that the engines let a sequence have; those of ``long`` have as
    many."""
    output = 32
    known = {load.name: load for load in DEFAULT_LOADS} | {LONG: Long(LONG, 8, context - output, output, 8)}
    return [known[name] for name in names]
