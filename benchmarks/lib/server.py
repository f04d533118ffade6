"""Starts a server as a user would, and knows afterwards whether anything of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.client import Client
from benchmarks.lib.dialect import ServerError
from benchmarks.lib.processes import send_all, session_processes
from benchmarks.lib.wire import WireError

MARK = "FASTDEPLOY_BENCHMARK_MARK"
LOG_LINES = 20
KILL_S = 10.0  # a killed process gives its memory back before it is gone


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A server, detached from our terminal. Every process that comes of it carries a mark in its environment, so that
    :meth:`left_over` finds those that outlive it, whatever they did to their process group."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """``folder``: existing, gets server.log and, under ipc/, the socket files."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.ipc = folder / "ipc"
        self.ipc.mkdir()
        self._mark = uuid.uuid4().hex
        env = os.environ | {MARK: self._mark, "FASTDEPLOY_IPC_ROOT": str(self.ipc)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def wait_ready(self, timeout_s: float, path: str = "/ready") -> float:
        """Seconds until ``path`` answered 200. Raises ServerError with the log's end if it does not."""
        start, client = time.perf_counter(), Client(self.url)
        while time.perf_counter() - start < timeout_s:
            self.require_running()
            try:
                if (await client.call("GET", path, timeout=5)).status == 200:
                    return time.perf_counter() - start
            except (OSError, WireError, TimeoutError):
                pass
            await asyncio.sleep(0.1)
        raise ServerError(f"the server did not become ready within {timeout_s:g} s; {self._log_end()}")

    def require_running(self) -> None:
        """Raise ServerError with the log's end if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerError(f"the server ended with status {status}; {self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "its log ends:\n" + "\n".join(lines) if lines else "its log is empty"

    def stop(self, timeout_s: float) -> tuple[int | None, float]:
        """Ctrl-C, as a terminal sends it: to all of them. Returns (exit code, seconds).

        The code is None if it has not ended after ``timeout_s``.
        """
        start = time.perf_counter()
        with contextlib.suppress(ProcessLookupError):  # it died by itself
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        return code, time.perf_counter() - start

    def left_over(self) -> list[int]:
        """Process ids that carry the mark."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked, or belongs to somebody else
        return found

    def processes(self) -> list[int]:
        """Process ids of its session and of all that carry the mark; a program that writes its title over its
        environment has lost that."""
        return sorted({*session_processes(self._process.pid), *self.left_over()})

    def kill(self) -> None:
        """End whatever is left, for good, and wait until it is gone."""
        send_all(self.processes(), signal.SIGKILL)
        self._process.wait()
        deadline = time.perf_counter() + KILL_S
        while self.left_over() and time.perf_counter() < deadline:
            time.sleep(0.01)
