"""A server as a process of its own, of any program that takes ``--port``. Linux only."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from fastdeploy.bench.client import ServerError
from fastdeploy.core.process import descendants
from fastdeploy.testing import guard

HOST = "127.0.0.1"
LOG_CHARACTERS = 4000  # of the end of the log in an error
POLL_S, CALL_S = 0.02, 5.0  # between two questions whether a server is ready; limit of one
STOP_S, KILL_S = 30.0, 10.0


class ServerFailed(ServerError):
    """The server did not become ready, has ended, or cannot be reset. The message has the end of its log."""


class ServerProcess:
    """A running ``command --port PORT``, with a log and a private folder.

    All its processes end with the ``with`` block, at :meth:`close`, and when this process ends in any way, kill -9
    included: a guard is the parent of the server (see guard.py). The port is free: this process keeps it bound, without
    listening, so the system gives it to nobody else. A server that sets SO_REUSEADDR, as servers do, may listen on it.

    url: without a path. log_path: of stdout and stderr. ipc: folder for sockets, of this server alone. pid: of the
    process of ``command``, the leader of a session of its own.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: str | Path | None = None
    ):
        """Start ``command``. environment: variables beside those of this process. log: file that is kept; None = a file
        that is removed at the end."""
        self._port = reserved_port()
        self.port: int = self._port.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.command = [*command, "--port", str(self.port)]
        self._folder = folder = Path(tempfile.mkdtemp(prefix="fd-"))  # short, since the path of a socket is limited
        self.ipc = folder / "ipc"
        self.ipc.mkdir()
        self.log_path = Path(log or folder / "server.log")
        self._lock = threading.Lock()
        self._code: int | None = None
        self._status, status_fd = os.pipe()
        guarded = [str(os.getpid()), str(status_fd), str(folder), *self.command]
        with self.log_path.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *guarded],
                env=os.environ | (environment or {}) | {"FASTDEPLOY_IPC_ROOT": str(self.ipc)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[status_fd],
                start_new_session=True,
            )
        os.close(status_fd)
        self.pid = self._read_status()

    def _read_status(self) -> int:
        """Return the next number that the guard says. If it was killed, so was the server, by the system."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            if not byte:
                return -signal.SIGKILL
            line += byte
        return int(line)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.close()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status of the server when it ends (negative: a signal); None after ``timeout_s``."""
        if self._code is None and select.select([self._status], [], [], timeout_s)[0]:
            with self._lock:
                if self._code is None:
                    self._code = self._read_status()
        return self._code

    def poll(self) -> int | None:
        """Return the exit status of the server; None = it runs."""
        return self.wait(0)

    def require_running(self, wait_s: float = 0.0) -> None:
        """Raise ServerFailed with the end of the log if the server has ended, or ends within ``wait_s``."""
        if (code := self.wait(wait_s)) is not None:
            raise ServerFailed(f"the server ended with status {code}; {self.log_end()}")

    def wait_ready(self, timeout_s: float, path: str = "/ready") -> float:
        """Wait until ``path`` answers 200; return the seconds since the call. Raises ServerFailed."""
        start = time.perf_counter()
        while time.perf_counter() - start < timeout_s:
            self.require_running()
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(HOST, self.port, timeout=min(CALL_S, timeout_s))
                with contextlib.closing(connection):
                    connection.request("GET", path)
                    if connection.getresponse().status == 200:
                        return time.perf_counter() - start
            time.sleep(POLL_S)
        raise ServerFailed(f"the server did not become ready within {timeout_s:g} s; {self.log_end()}")

    def send_signal(self, number: int) -> None:
        """Send a signal to the process of the command. It is no error if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int | None:
        """Ask the server to stop, and return its exit status; None = it still runs after ``timeout_s``."""
        self.send_signal(number)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """Kill all processes of the server, and return when they have ended."""
        deadline = time.monotonic() + KILL_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        """Kill what is left of the server, and remove its folder. May be called again."""
        if self._guard.returncode is None:
            self._guard.terminate()
            self._guard.wait()
            self.wait()
            os.close(self._status)
            self._port.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # if the guard was killed

    # ------------------------------------------------------------------ what it is made of

    def processes(self) -> list[int]:
        """Return the ids of all living processes of the server: ``pid``, its descendants, and those that have outlived
        their parents."""
        return sorted(descendants(self._guard.pid))

    def pids(self, of: str) -> list[int]:
        """Return the processes of the server whose command line, joined by spaces, contains ``of``."""
        return [pid for pid in self.processes() if of in " ".join(command_words(pid))]

    def log(self, begin: int = 0) -> str:
        """Return the log from byte ``begin`` on; empty if the log was removed."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_path.read_bytes()[begin:].decode(errors="replace")
        return ""

    def log_size(self) -> int:
        """Return the bytes of the log so far."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_end(self) -> str:
        """Return the last lines of the log, with a heading."""
        text = self.log()[-LOG_CHARACTERS:]
        return f"its log ends:\n{text}" if text else "its log is empty"


def reserved_port() -> socket.socket:
    """Return a socket that is bound to a free port and does not listen. While it is open, the system gives the port to
    nobody who asks for any port, but a server that names the port and shares addresses may listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


def free_port() -> int:
    """Return a port that is free: for a server that cannot be a ServerProcess, since another may take the port."""
    with reserved_port() as reserved:
        port: int = reserved.getsockname()[1]
    return port


def command_words(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return []
