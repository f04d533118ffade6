"""Pausing a live server in every mode, and recording the timelines that verdicts.py checks."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from acceptance.lib import verdicts
from acceptance.lib.verdicts import Check, PauseRun
from benchmarks.lib.dialect import Dialect, Gauges
from fastdeploy.bench.client import ServerError, Stream
from fastdeploy.bench.timeline import StreamLog, median_step
from fastdeploy.bench.workload import completion, prompt_ids

NEW_REQUESTS = 5
NEW_REQUEST_TOKENS = 16
PROBE_S = 10.0
SPARE_FILES = 256
# Least length of a keep pause, in steps, for slow steps: a little more than verdicts.py asks for.
FREEZE_STEPS = verdicts.MIN_FREEZE_STEPS + 2
# Tokens of each running stream between the last request sent and the pause, for the measurement of the step time.
SETTLE = 12
SETTLE_S = 0.2
CHECKS_OF_MODE = {"abort": verdicts.check_abort, "keep": verdicts.check_keep, "wait": verdicts.check_wait}


@dataclass(frozen=True)
class Options:
    """Settings of a run. running: the server's max_num_seqs. before: tokens of every running stream at the pause.
    wait_tokens: max_tokens in mode wait, whose pause lasts until their end. freeze_s: length of a keep pause.
    after: tokens to wait for after keep's resume. waiting: queue length of two extra scenarios; 0: without them."""

    model: str
    streams: int = 20
    running: int = 8
    prompt_tokens: int = 512
    max_tokens: int = 3000
    before: int = 50
    after: int = 20
    wait_tokens: int = 64
    freeze_s: float = 2.0
    waiting: int = 0
    timeout_s: float = 60.0
    load_timeout_s: float = 300.0
    seed: int = 0


@dataclass
class Outcome:
    """runs: one per scenario, in order. checks: every verdict."""

    runs: list[PauseRun] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]


class Acceptance:
    """Runs the scenarios one after the other. say: gets a line per stage. show: gets new checks. prompt: makes prompt
    number i; default: seeded random ids."""

    def __init__(
        self,
        dialect: Dialect,
        options: Options,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[list[Check]], None] = lambda _: None,
        prompt: Callable[[int], list[int]] | None = None,
    ) -> None:
        self.dialect, self.options = dialect, options
        self._say, self._show = say, show
        self._live: list[Stream] = []
        self._make_prompt = prompt or (lambda index: prompt_ids(options.seed, index, options.prompt_tokens))
        self._prompts: dict[int, list[int]] = {}
        self._sent = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Run all scenarios. Raises ServerError, WireError, OSError or TimeoutError if the server cannot be driven."""
        options, outcome = self.options, self.outcome
        start = await self._idle_gauges()
        scenarios = [(mode, mode, options.streams) for mode in ("abort", "keep", "wait")]
        if options.waiting:
            total = options.running + options.waiting
            scenarios += [(f"{mode}, {options.waiting} waiting", mode, total) for mode in ("abort", "keep")]
        try:
            for name, mode, streams in scenarios:
                run = await self._scenario(name, mode, streams)
                outcome.runs.append(run)
                self._add(CHECKS_OF_MODE[mode](run, rejects=self.dialect.rejects))
            self._add(await self._compare())
            self._say(f"after: {NEW_REQUESTS} new requests")
            indices = range(100_000, 100_000 + NEW_REQUESTS)
            fresh = await self._complete([NEW_REQUEST_TOKENS] * NEW_REQUESTS, indices, "new")
            await self._clear()
            after = await self._idle_gauges(must=False)
            self._add(verdicts.check_after(fresh, NEW_REQUEST_TOKENS, NEW_REQUESTS, start, after))
        finally:
            for stream in self._live:
                stream.cancel()
        return outcome

    def _add(self, checks: list[Check]) -> None:
        self.outcome.checks += checks
        self._show(checks)

    # ------------------------------------------------------------------ one scenario

    async def _scenario(self, name: str, mode: str, count: int) -> PauseRun:
        options = self.options
        tokens = options.wait_tokens if mode == "wait" else options.max_tokens
        for index in range(count):  # made before any stream runs, since it would delay the timestamps of tokens
            self._prompt(index)
        before = await self._idle_gauges()
        self._say(f"{name}: starting {count} streams, {options.running} of them running")
        if mode == "wait":
            await self._warm()
        streams = await self._load(name, count, tokens)
        settle_s = 0.0 if mode == "wait" else SETTLE_S
        await asyncio.sleep(settle_s)  # tokens that arrive late while requests are sent are not measured
        steady_at = time.perf_counter()
        await asyncio.sleep(settle_s)
        running, least = streams[: options.running], 0 if mode == "wait" else options.before
        more = tokens // 4 if mode == "wait" else SETTLE
        await self._tokens(running, [max(least, stream.log.num_tokens + more) for stream in running])
        loaded = await self.dialect.gauges()

        self._say(f"{name}: pausing")
        window = None
        called_at = time.perf_counter()
        pause = asyncio.create_task(self._pause(mode))
        if mode == "wait" and self.dialect.rejects:
            window = await self._probe_window(pause)
        await pause
        replied_at = time.perf_counter()
        self._say(f"{name}: paused after {replied_at - called_at:.3f} s")
        if mode == "abort":
            await self._closed(streams)
        paused = await self.dialect.gauges()
        probes = [await self._send(200_000, NEW_REQUEST_TOKENS, f"{name} probe")]
        if mode == "keep" or not self.dialect.rejects:
            step_s = median_step([stream.log for stream in running], steady_at, called_at)
            await asyncio.sleep(max(options.freeze_s, FREEZE_STEPS * step_s))
        else:
            await self._answer(probes[0])
        resume_called_at = time.perf_counter()
        await self.dialect.resume()
        resume_replied_at = time.perf_counter()
        self._say(f"{name}: resumed")
        await self._finish(mode, streams, probes)
        return PauseRun(
            scenario=name,
            running=options.running,
            complete_tokens=tokens,
            streams=[stream.log for stream in streams],
            steady_at=steady_at,
            called_at=called_at,
            replied_at=replied_at,
            resume_called_at=resume_called_at,
            resume_replied_at=resume_replied_at,
            before=before,
            loaded=loaded,
            paused=paused,
            probes=[probe.log for probe in probes],
            window_probe=window[1].log if window else None,
            window_seen_at=window[0] if window else None,
        )

    async def _load(self, name: str, count: int, max_tokens: int) -> list[Stream]:
        """Start ``running`` streams; when each has a token, start the others; wait until the gauges show all."""
        running = self.options.running
        first = await asyncio.gather(*(self._send(i, max_tokens, name) for i in range(running)))
        await self._tokens(first, [1] * running)
        others = await asyncio.gather(*(self._send(i, max_tokens, name) for i in range(running, count)))
        await self._until(lambda g: g.waiting >= count - running, f"{count - running} waiting requests")
        return [*first, *others]

    async def _warm(self) -> None:
        """Put the running streams' prompts into the prefix cache. In mode wait, a stream has so few tokens that without
        the cache the first stream would end during the prefill of the others."""
        running = range(self.options.running)
        await self._complete([1] * len(running), list(running), "warm")

    async def _pause(self, mode: str) -> None:
        """Pause in ``mode``: keep without clearing the cache, wait with admission reject."""
        admission, timeout_s = "reject" if mode == "wait" else None, self.options.timeout_s
        await self.dialect.pause(mode, clear_cache=mode != "keep", admission=admission, timeout_s=timeout_s)

    async def _probe_window(self, pause: asyncio.Task[None]) -> tuple[float, Stream] | None:
        """Poll the flags until the server rejects but is not paused yet, then send a request. None if the pause ended
        before."""
        while not pause.done():
            flags = await self.dialect.flags()
            if flags.rejecting and not flags.is_paused:
                seen_at = time.perf_counter()
                probe = await self._send(200_001, NEW_REQUEST_TOKENS, "window probe")
                await self._answer(probe)
                return seen_at, probe
        return None

    async def _finish(self, mode: str, streams: Sequence[Stream], probes: Sequence[Stream]) -> None:
        """End every stream of a resumed scenario, and leave an idle server with empty caches."""
        if mode == "keep":
            targets = [stream.log.num_tokens + self.options.after for stream in streams[: self.options.running]]
            await self._tokens(streams[: self.options.running], targets)
            await self._clear()
        await self._closed([*streams, *probes])

    async def _clear(self) -> None:
        await self.dialect.pause("abort", clear_cache=True, timeout_s=self.options.timeout_s)
        await self.dialect.resume()

    # ------------------------------------------------------------------ the undisturbed run

    async def _compare(self) -> list[Check]:
        """Run the interrupted prompts again without a pause, and compare every token."""
        runs, running = self.outcome.runs, self.options.running
        interrupted = [[(i, log) for i, log in enumerate(run.streams[:running]) if log.tokens] for run in runs]
        longest: dict[int, int] = {}
        for i, log in chain(*interrupted):
            longest[i] = max(longest.get(i, 1), log.num_tokens)
        self._say(f"reference: {len(longest)} undisturbed streams")
        whole = await self._complete(list(longest.values()), list(longest), "reference")
        reference = dict(zip(longest, whole, strict=True))
        return [
            verdicts.check_texts(run.scenario, [(log, reference[i]) for i, log in logs])
            for run, logs in zip(runs, interrupted, strict=True)
        ]

    async def _complete(self, max_tokens: Sequence[int], indices: Sequence[int], name: str) -> list[StreamLog]:
        streams = await asyncio.gather(*(self._send(i, n, name) for i, n in zip(indices, max_tokens, strict=True)))
        return await self._closed(streams)

    # ------------------------------------------------------------------ helpers

    async def _send(self, index: int, max_tokens: int, name: str) -> Stream:
        options = self.options
        self._sent += 1
        request_id = f"{name} {index} #{self._sent}".replace(" ", "-").replace(",", "")
        body = completion(options.model, self._prompt(index), max_tokens, request_id)
        stream = await self.dialect.client.stream("/v1/completions", body, request_id)
        self._live.append(stream)
        return stream

    def _prompt(self, index: int) -> list[int]:
        if index not in self._prompts:
            self._prompts[index] = self._make_prompt(index)
        return self._prompts[index]

    async def _closed(self, streams: Sequence[Stream]) -> list[StreamLog]:
        """Wait for the end of every stream. A stream that does not end in time is cancelled, and fails its check."""
        pending = asyncio.gather(*(stream.wait_closed() for stream in streams))
        try:
            await asyncio.wait_for(pending, self.options.load_timeout_s)
        except TimeoutError:
            for stream in streams:
                stream.cancel()
        return [stream.log for stream in streams]

    async def _tokens(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        """Wait until each stream has its count of tokens, or has ended."""
        work = asyncio.gather(*(stream.wait_tokens(n) for stream, n in zip(streams, counts, strict=True)))
        try:
            await asyncio.wait_for(work, self.options.load_timeout_s)
        except TimeoutError:
            have = [stream.log.num_tokens for stream in streams]
            raise ServerError(f"running streams have {have} tokens, not {list(counts)}, in time") from None

    async def _answer(self, probe: Stream) -> None:
        """Wait for the answer to a request that should be refused; a held request has none yet."""
        with suppress(TimeoutError):
            await asyncio.wait_for(probe.wait_closed(), min(PROBE_S, self.options.load_timeout_s))

    async def _until(self, reached: Callable[[Gauges], bool], what: str, timeout_s: float | None = None) -> Gauges:
        deadline = time.perf_counter() + (timeout_s or self.options.load_timeout_s)
        while not reached(gauges := await self.dialect.gauges()):
            if time.perf_counter() > deadline:
                raise ServerError(f"never saw {what}; last gauges: {gauges}")
            await asyncio.sleep(0.05)
        return gauges

    async def _idle_gauges(self, must: bool = True) -> Gauges:
        """Return the gauges of the idle server; with ``must`` False, the gauges after five seconds at the latest."""
        try:
            return await self._until(lambda g: g.running == g.waiting == 0, "an idle server", 30 if must else 5)
        except ServerError:
            if must:
                raise
            return await self.dialect.gauges()


def allow_files(count: int) -> None:
    """Raise the soft limit of open files to ``count`` sockets. Raises ValueError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + SPARE_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + SPARE_FILES, hard))
