"""Starting and stopping a server, and finding processes that it left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib.client import Client
from benchmarks.lib.dialect import ServerError
from benchmarks.lib.http_reader import WireError
from benchmarks.lib.processes import send_all, session_processes

MARK = "FASTDEPLOY_BENCHMARK_MARK"
LOG_LINES = 20
KILL_S = 10.0  # limit of the wait for a killed process, which first frees its memory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A server in a session of its own. All its processes have a mark in their environment, by which :meth:`left_over`
    finds those that outlive the server, also in another process group."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start ``command``. folder: exists; gets server.log, and the socket files under ipc/. environment: variables
        beside those of this process."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.ipc = folder / "ipc"
        self.ipc.mkdir()
        self._mark = uuid.uuid4().hex
        env = os.environ | (environment or {}) | {MARK: self._mark, "FASTDEPLOY_IPC_ROOT": str(self.ipc)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the session."""
        return self._process.pid

    async def wait_ready(self, timeout_s: float, path: str = "/ready") -> float:
        """Wait until ``path`` answers 200; return the seconds since the call. Raises ServerError with the end of the
        log."""
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

    def require_running(self, wait_s: float = 0.0) -> None:
        """Raise ServerError with the end of the log if the process has ended, or ends within ``wait_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(wait_s)
            raise ServerError(f"the server ended with status {status}; {self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "its log ends:\n" + "\n".join(lines) if lines else "its log is empty"

    def stop(self, timeout_s: float) -> tuple[int | None, float]:
        """Send SIGINT to all processes, as Ctrl-C does. Return (exit code, seconds); code None: still running after
        ``timeout_s``."""
        start = time.perf_counter()
        with contextlib.suppress(ProcessLookupError):  # the server has ended by itself
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        return code, time.perf_counter() - start

    def left_over(self) -> list[int]:
        """Return the ids of living processes with the mark."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # the process has just ended, or belongs to another user
        return found

    def processes(self) -> list[int]:
        """Return the process ids of the session and of all processes with the mark. A program that writes its
        title over its environment has no mark."""
        return sorted({*session_processes(self._process.pid), *self.left_over()})

    def kill(self) -> None:
        """Kill all processes that are left, and wait for their end."""
        send_all(self.processes(), signal.SIGKILL)
        self._process.wait()
        deadline = time.perf_counter() + KILL_S
        while self.left_over() and time.perf_counter() < deadline:
            time.sleep(0.01)
