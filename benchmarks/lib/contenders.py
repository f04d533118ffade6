"""The running servers of a comparison: started one after the other, measured in turn, each alone on the machine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from benchmarks.lib.engines import Engine
from benchmarks.lib.processes import cpu_seconds, peak_bytes, send_all
from fastdeploy.bench.client import FAILURES, Client
from fastdeploy.testing import ServerProcess

READY_S = 600.0  # limit of an engine's start
STOP_S = 15.0
ENDING_S = 2.0  # limit of the wait for the end of a server whose connections have broken
IDLE_CORES = 0.05  # a server that uses more of a core is not idle
WATCH_S, REST_S = 0.5, 10.0  # length of one measurement of CPU use; limit of the wait for an idle server

Result = TypeVar("Result")


class Contender:
    """One engine's running server. ready_s, start_bytes: time and largest memory of all its processes until it was
    ready. frozen: stopped by SIGSTOP until its next load, since it did not become idle."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.server = ServerProcess(engine.command)
        self.client = Client(self.server.url)
        self.ready_s, self.start_bytes = 0.0, 0
        self.frozen = False

    async def start(self, ready_s: float) -> None:
        """Wait until the server is ready and idle. Raises ServerFailed if it is not ready after ``ready_s`` seconds."""
        self.ready_s = self.server.wait_ready(ready_s, self.engine.ready)
        self.start_bytes = peak_bytes(self.server.processes())
        await self.wait_idle()

    def close(self) -> None:
        self.unfreeze()
        self.server.stop(timeout_s=STOP_S)
        self.server.close()

    def unfreeze(self) -> None:
        if self.frozen:
            send_all(self.server.processes(), signal.SIGCONT)
            self.frozen = False

    async def wait_idle(self) -> None:
        """Wait until the server uses no more CPU; freeze it if it still does after REST_S."""
        start, processes = time.perf_counter(), self.server.processes()
        while time.perf_counter() - start < REST_S:
            before = cpu_seconds(processes)
            await asyncio.sleep(WATCH_S)
            if cpu_seconds(processes) - before <= IDLE_CORES * WATCH_S:
                return
        send_all(processes, signal.SIGSTOP)
        self.frozen = True

    async def token_metric(self) -> tuple[float, float]:
        """Return sum and count of the engine's own histogram of the time between tokens; zeros if it has none."""
        if self.engine.token_metric is None:
            return 0.0, 0.0
        values = await self.client.metrics()
        name = self.engine.token_metric
        return values.get(f"{name}_sum", 0.0), values.get(f"{name}_count", 0.0)

    async def run(self, work: Callable[[Client], Awaitable[Result]]) -> Result:
        """Return the result of ``work``, while no other server runs; then wait until this server is idle.

        Raises ServerError, WireError, OSError or TimeoutError if the server ends or cannot be driven."""
        self.unfreeze()
        try:
            result = await work(self.client)
        except FAILURES:  # a process that dies closes its connections before its exit status is known
            self.server.require_running(ENDING_S)
            raise
        self.server.require_running()
        await self.wait_idle()
        return result


class RunningEngines:
    """The engines that are compared. The first one is the base of all ratios. Another one that cannot be started, or
    that ends, is removed, and ``say`` gets the reason."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.contenders: list[Contender] = []
        self._say = say

    @contextmanager
    def started(self, engines: Sequence[Engine], ready_s: float) -> Iterator[None]:
        """Start the servers one after the other, to time each start. Stop all of them at the end."""
        try:
            for engine in engines:
                contender = Contender(engine)
                self.contenders.append(contender)
                with self.removed_on_failure(contender):
                    asyncio.run(contender.start(ready_s))
                    self._say(f"{engine.name} {engine.version}: ready after {contender.ready_s:.1f} s")
            yield
        finally:
            for contender in self.contenders:
                contender.close()

    @contextmanager
    def removed_on_failure(self, contender: Contender) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if contender is self.contenders[0]:
                raise
            self.contenders.remove(contender)
            contender.close()
            self._say(f"without {contender.engine.name}: {error or type(error).__name__}")
