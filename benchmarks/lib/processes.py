"""CPU time and memory of processes, and signals to them. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHARED_MEMORY = "/dev/shm"
SAMPLE_S = 0.02  # between two looks at memory


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of these processes, all threads. Processes that have ended count as 0."""
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime(~pid << 3 | 2)  # the id of the clock that clock_getcpuclockid(3) returns
    return seconds


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process that are in memory, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def own_bytes(pid: int) -> int:
    """Return the bytes of a process that are in memory, and that it shares with no other one; 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
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
