"""Engines in processes of their own, on a runner that sleeps. They can be killed, stopped, slowed and restarted.

They are forked from a process that has imported all that an engine needs, so one starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.process import collect_rarely
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.engine.requests.retention import RetainedLog
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport

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


def run_engine(order: EngineOrder, slowness: Any, bound: Any) -> None:
    """Run an engine until its process is killed. slowness: of each engine, by number. bound: released when the engine
    has bound its socket."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the process that it was forked from
    logging.getLogger("fastdeploy.engine").setLevel(logging.ERROR)  # it tells of each client that goes
    runner = SleepingRunner(order.costs, lambda: slowness[order.number])
    transport = ZmqRouterTransport(order.endpoint)
    engine = CommonEngine(order.config, runner, transport, uuid.uuid4().hex, retained_log=RetainedLog(order.log))
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

    def _launch(self, numbers: range | list[int]) -> None:
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

    def restart(self, i: int) -> None:
        """Kill engine i if it lives, and start a new one at its endpoint: with the first weights, and no requests."""
        with self._lock:
            self.kill(i)
            self._launch([i])

    def alive(self, i: int) -> bool:
        """Return whether the process of engine i has not ended. It may be stopped."""
        return self._processes[i].is_alive()

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


if multiprocessing.parent_process() is None:  # here, and not in the process that engines are forked from
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The engine itself, and what the programs import, since each process imports the module that was run.
    SPAWN.set_forkserver_preload([__name__, "uvloop", "benchmarks.lib.report", "fastdeploy.fleet.client"])
else:
    gc.freeze()
