"""Engines in processes of their own, on a runner that sleeps. They can be killed, stopped, slowed and restarted."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lib.fleet.nursery import FACTOR, EngineOrder
from benchmarks.lib.fleet.runner import Costs
from fastdeploy.core.config import EngineConfig
from fastdeploy.fleet.launcher import Placement

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0  # for imports on a busy machine


class FakeEngines:
    """Engine processes, numbered from 0. Use as a context, or call :meth:`close`. Methods may be called on any thread,
    and block for some milliseconds. costs: see Costs."""

    def __init__(self, costs: Costs | None = None):
        self._costs = costs or Costs()
        self._folder = tempfile.TemporaryDirectory(prefix="fastdeploy-engines-")
        self._lock = threading.Lock()
        self._orders: list[EngineOrder] = []
        self._pidfds: list[int | None] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._answers = b""

    def start(self, num: int, **settings: Any) -> list[Placement]:
        """Start engines 0 to num - 1, and wait until each has bound its socket. settings: of EngineConfig."""
        folder = self._folder.name
        factors = Path(folder) / "factors"
        factors.write_bytes(FACTOR.pack(1.0) * num)
        with factors.open("r+b") as file:
            self._factors = mmap.mmap(file.fileno(), 0)
        config = EngineConfig(**{"model": "sleeping", "model_roots": ("/",), **settings})
        self._orders = [
            EngineOrder(i, f"ipc://{folder}/{i}.sock", str(factors), f"{folder}/{i}.log", self._costs, config)
            for i in range(num)
        ]
        self._pidfds = [None] * num
        command = [sys.executable, "-m", "benchmarks.lib.fleet.nursery"]
        self._nursery = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        with self._lock:
            self._launch(range(num))
        return [
            Placement(f"replica-{order.number}", order.endpoint, f"http://replica-{order.number}", "here")
            for order in self._orders
        ]

    def _launch(self, numbers: range | list[int]) -> None:
        assert self._nursery is not None and self._nursery.stdin is not None
        for number in numbers:
            self._nursery.stdin.write(msgspec.json.encode(self._orders[number]) + b"\n")
        self._nursery.stdin.flush()
        for _ in numbers:
            number, pid = map(int, self._answer().split())
            self._pidfds[number] = os.pidfd_open(pid)

    def _answer(self) -> bytes:
        """Return the next line of the nursery's stdout. Raises RuntimeError if none comes."""
        assert self._nursery is not None and self._nursery.stdout is not None
        while b"\n" not in self._answers:
            ready = select.select([self._nursery.stdout], [], [], START_S)[0]
            more = os.read(self._nursery.stdout.fileno(), 65536) if ready else b""
            if not more:
                raise RuntimeError("a fake engine did not start")
            self._answers += more
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def kill(self, i: int) -> None:
        """Kill engine i, and return when its process has ended. No effect if it has ended."""
        if (pidfd := self._pidfds[i]) is not None:
            self._signal(i, signal.SIGKILL)
            select.select([pidfd], [], [])
            os.close(pidfd)
            self._pidfds[i] = None

    def stop(self, i: int) -> None:
        """Stop the process of engine i, which lives, until :meth:`cont`."""
        self._signal(i, signal.SIGSTOP)

    def cont(self, i: int) -> None:
        """Let the process of engine i go on."""
        self._signal(i, signal.SIGCONT)

    def slow(self, i: int, factor: float) -> None:
        """Let each later step of engine i take ``factor`` times its time. 1 = as before. A restart does not change the
        factor."""
        FACTOR.pack_into(self._factors, i * FACTOR.size, factor)

    def restart(self, i: int) -> None:
        """Kill engine i if it lives, and start a new one at its endpoint: with the first weights, and no requests."""
        with self._lock:
            self.kill(i)
            self._launch([i])

    def alive(self, i: int) -> bool:
        """Return whether the process of engine i has not ended. It may be stopped."""
        pidfd = self._pidfds[i]
        return pidfd is not None and not select.select([pidfd], [], [], 0)[0]

    def _signal(self, i: int, number: signal.Signals) -> None:
        pidfd = self._pidfds[i]
        assert pidfd is not None, f"engine {i} was killed"
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(pidfd, number)

    def close(self) -> None:
        """Kill all engines."""
        if self._nursery is not None:
            assert self._nursery.stdin is not None and self._nursery.stdout is not None
            self._nursery.stdin.close()  # then it kills its group, itself too
            self._nursery.wait()
            self._nursery.stdout.close()
            self._nursery = None
        for i, pidfd in enumerate(self._pidfds):
            if pidfd is not None:
                os.close(pidfd)
                self._pidfds[i] = None
        self._folder.cleanup()

    def __enter__(self) -> FakeEngines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
