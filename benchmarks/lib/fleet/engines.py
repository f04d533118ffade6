"""Engines in processes of their own, on a runner that sleeps, and their launcher, which can harm them too.

They are forked from a process that has imported all that an engine needs, so one starts in a few milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from benchmarks.lib.processes import cpu_seconds
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.process import collect_rarely, host_id
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.engine.requests.retention import RetainedLog
from fastdeploy.fleet.launcher import Placement, WithoutRoll
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport
from fastdeploy.scheduler.drafts import NoDrafts

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0  # for imports on a busy machine
PR_SET_PDEATHSIG = 1
SPAWN = multiprocessing.get_context("forkserver")


class EngineOrder(msgspec.Struct, frozen=True):
    """An engine to start. log: see RetainedLog."""

    number: int
    endpoint: str
    log: str
    costs: Costs
    config: EngineConfig


def end_with_program() -> None:
    """Let the system kill this process when the program that started it ends, in whatever way. It is killed when the
    process that it was forked from ends; and that one ends when nobody has a certain pipe open any more. Only the
    program may have it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def run_engine(order: EngineOrder, slowness: Any, bound: Any) -> None:
    """Run an engine until its process is killed. slowness: of each engine, by number. bound: released when the engine
    has bound its socket."""
    end_with_program()
    logging.getLogger("fastdeploy.engine").setLevel(logging.ERROR)  # it tells of each client that goes
    runner = SleepingRunner(order.costs, lambda: slowness[order.number])
    transport = ZmqRouterTransport(order.endpoint)
    engine = CommonEngine(
        order.config, runner, transport, uuid.uuid4().hex, retained_log=RetainedLog(order.log), drafter=NoDrafts()
    )
    collect_rarely()
    bound.release()
    engine.run()


class FakeEngines:
    """Engine processes, numbered from 0. Use as a context, or call :meth:`close`. Methods may be called on any thread,
    and block for some milliseconds. costs: see Costs."""

    def __init__(self, costs: Costs | None = None):
        self._costs = costs or Costs()
        self._folder = tempfile.TemporaryDirectory(prefix="fastdeploy-engines-")
        self._lock = threading.RLock()
        self._orders: list[EngineOrder] = []
        self._processes: dict[int, BaseProcess] = {}
        self._bound = SPAWN.Semaphore(0)

    def start(self, num: int, **settings: Any) -> list[Placement]:
        """Start engines 0 to num - 1, and wait until each has bound its socket. settings: of EngineConfig."""
        folder = self._folder.name
        config = EngineConfig(**{"model": "sleeping", "model_roots": ("/",), **settings})
        self._slowness = SPAWN.RawArray("d", [1.0] * num)
        self._orders = [
            EngineOrder(i, f"ipc://{folder}/{i}.sock", f"{folder}/{i}.log", self._costs, config) for i in range(num)
        ]
        with self._lock:
            self._launch(range(num))
        return [
            Placement(f"replica-{order.number}", order.endpoint, f"http://replica-{order.number}", "here")
            for order in self._orders
        ]

    def _launch(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            arguments = (self._orders[number], self._slowness, self._bound)
            self._processes[number] = SPAWN.Process(target=run_engine, args=arguments, daemon=True)
            self._processes[number].start()
        for _ in numbers:
            if not self._bound.acquire(timeout=START_S):
                raise RuntimeError("a fake engine did not start")

    def kill(self, i: int) -> None:
        """Kill engine i, and return when its process has ended. No effect if it has ended."""
        with self._lock:
            self._processes[i].kill()
            self._processes[i].join()

    def stop(self, i: int) -> None:
        """Stop the process of engine i, which lives, until :meth:`cont`."""
        self._signal(i, signal.SIGSTOP)

    def cont(self, i: int) -> None:
        """Let the process of engine i go on."""
        self._signal(i, signal.SIGCONT)

    def slow(self, i: int, factor: float) -> None:
        """Let each later step of engine i take ``factor`` times its time. 1 = as before. A restart does not change the
        factor."""
        self._slowness[i] = factor

    def restart(self, *numbers: int) -> None:
        """Kill these engines if they live, and start new ones at their endpoints: with the first weights, and no
        requests."""
        with self._lock:
            for i in numbers:
                self.kill(i)
            self._launch(numbers)

    def alive(self, i: int) -> bool:
        """Return whether the process of engine i has not ended. It may be stopped."""
        return self._processes[i].is_alive()

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU time of each living engine, by its process."""
        pids = [process.pid for process in self._processes.values() if process.is_alive() and process.pid is not None]
        return {pid: cpu_seconds([pid]) for pid in pids}

    def _signal(self, i: int, number: signal.Signals) -> None:
        with self._lock:
            process = self._processes[i]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def close(self) -> None:
        """Kill all engines."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> FakeEngines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Restart:
    """A restart that the gateway asked for. harm: what was done to the engine before; "" = nothing."""

    name: str
    why: str
    harm: str


class EngineLauncher(WithoutRoll):
    """Starts ``num`` engines, for any number of gateways in one event loop. settings: of EngineConfig.

    harmed: by name, what was done to the engine of a replica since it was started. num_harmed: by name, how often
    something was done to it, with its restarts. restarts: in their order. delays: by name, seconds before the next
    restart, in which the cut-off engine may run on."""

    def __init__(self, engines: FakeEngines, num: int, **settings: Any):
        self._engines = engines
        self.listed = [replace(placement, host=host_id()) for placement in engines.start(num, **settings)]
        self._numbers = {placement.name: i for i, placement in enumerate(self.listed)}
        self.harmed: dict[str, str] = {}
        self.num_harmed = Counter[str]()
        self.restarts: list[Restart] = []
        self.delays: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    # ------------------------------------------------------------------ see Launcher

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield self.listed

    async def restart(self, name: str, why: str) -> None:
        self.restarts.append(Restart(name, why, self.harmed.get(name, "")))
        await asyncio.sleep(self.delays.pop(name, 0.0))
        await self._renew(name)

    async def add(self) -> str:
        raise NotImplementedError("the number of these engines is fixed")

    async def remove(self, name: str) -> None:
        raise NotImplementedError("the number of these engines is fixed")

    async def close(self) -> None:
        return

    # ------------------------------------------------------------------ harm

    async def kill(self, name: str, down_s: float) -> None:
        """Kill an engine. A new one starts after ``down_s`` seconds, if nobody else has started one."""
        self._harm(name, "killed")
        await asyncio.to_thread(self._engines.kill, self._numbers[name])
        await asyncio.sleep(down_s)
        if not self._engines.alive(self._numbers[name]):
            await self._renew(name)

    async def stop(self, name: str, seconds: float) -> None:
        """Stop the process of an engine for some time. A restart ends that too."""
        self._harm(name, "stopped")
        await asyncio.to_thread(self._engines.stop, self._numbers[name])
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._engines.cont, self._numbers[name])
        self._healed(name, "stopped")

    async def slow(self, name: str, factor: float, seconds: float) -> None:
        """Let the steps of an engine take ``factor`` times their time, for some time. A restart ends that too."""
        self._harm(name, "slowed")
        self._engines.slow(self._numbers[name], factor)
        await asyncio.sleep(seconds)
        self._engines.slow(self._numbers[name], 1.0)
        self._healed(name, "slowed")

    def _harm(self, name: str, harm: str) -> None:
        self.harmed[name] = harm
        self.num_harmed[name] += 1

    def _healed(self, name: str, harm: str) -> None:
        if self.harmed.get(name) == harm:
            del self.harmed[name]

    async def _renew(self, name: str) -> None:
        self.num_harmed[name] += 1  # now, since it dies in a moment, and at the end
        self._engines.slow(self._numbers[name], 1.0)
        await asyncio.to_thread(self._engines.restart, self._numbers[name])
        self.harmed.pop(name, None)
        self.num_harmed[name] += 1


os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# The engine itself, and what the programs import, since each process imports the module that was run.
SPAWN.set_forkserver_preload([__name__, "uvloop", "benchmarks.lib.report", "fastdeploy.fleet.client"])
