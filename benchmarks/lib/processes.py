"""Starting and stopping servers, the processes that they have or leave, their CPU time and memory, and signals. Linux
only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fastdeploy.bench.client import Client, ServerError, WireError

MARK = "FASTDEPLOY_BENCHMARK_MARK"
LOG_LINES = 20
STOP_S = 20.0
KILL_S = 10.0  # limit of the wait for a killed process, which first frees its memory
TICKS_PER_S, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
SHARED_MEMORY = "/dev/shm"
SAMPLE_S = 0.02  # between two looks at memory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on. Raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def session_processes(leader: int) -> list[int]:
    """Return the process ids of a session: all processes of a server started with ``start_new_session``, except those
    that left the session."""
    found = []
    for pid in _all_processes():
        with contextlib.suppress(OSError):  # the process has just ended
            if int(_fields(pid)[3]) == leader:
                found.append(pid)
    return sorted(found)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of these processes, all threads. Processes that have ended count as 0."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(pid)[11:13]))
    return ticks / TICKS_PER_S


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def sigterm_held() -> Iterator[None]:
    """Let a SIGTERM that arrives in the block act at its end. So no server is started that its owner does not know yet,
    and cannot stop. For the main thread."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)


def command_words(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


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
            with contextlib.suppress(OSError, WireError, TimeoutError):
                if (await client.call("GET", path, timeout=5)).status == 200:
                    return time.perf_counter() - start
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

    def stop(self, timeout_s: float = STOP_S) -> tuple[int | None, float]:
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
        for pid in _all_processes():
            with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
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


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a server whose files are in a temporary folder. At the end it is stopped, and what is left of it killed."""
    with tempfile.TemporaryDirectory(prefix="fd-") as folder:
        server = ServerProcess(command, Path(folder), environment)
        try:
            yield server
        finally:
            server.stop()
            server.kill()


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process that are in memory, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def peak_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the largest memory that each process had since its start, or since ``reset_peak``."""
    return sum(_status_bytes(pid, "VmHWM") for pid in pids)


def reset_peak(pids: Iterable[int]) -> None:
    """Let ``peak_bytes`` count from now on."""
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has just ended
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_bytes(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status in bytes; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


class PeakMemory:
    """The largest memory of a server while the ``with`` block runs, every SAMPLE_S seconds.

    engine: bytes of the largest process. shared: bytes in /dev/shm beyond those at the start of the block."""

    def __init__(self, pids: Iterable[int]):
        self._pids = list(pids)
        self.engine = self.shared = self._before = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._before = _used_shared()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.engine = max(self.engine, *map(resident_bytes, self._pids))
            self.shared = max(self.shared, _used_shared() - self._before)
            if self._ended.wait(SAMPLE_S):
                return


def _used_shared() -> int:
    found = os.statvfs(SHARED_MEMORY)
    return (found.f_blocks - found.f_bfree) * found.f_bsize
