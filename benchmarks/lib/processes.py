"""The processes of a server: their ids, CPU time and memory, and signals to all of them. Linux only."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
SHARED_MEMORY = "/dev/shm"
SAMPLE_S = 0.02


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on. Raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def session_processes(leader: int) -> list[int]:
    """Return the process ids of a session: all processes of a server started with ``start_new_session``, except those
    that left the session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(_fields(int(entry.name))[3]) == leader:
                found.append(int(entry.name))
        except OSError:
            continue  # the process has just ended
    return sorted(found)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of these processes, all threads. Processes that have ended count as 0."""
    ticks = 0
    for pid in pids:
        try:
            ticks += sum(map(int, _fields(pid)[11:13]))
        except OSError:
            continue
    return ticks / TICKS_PER_S


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process that are in memory, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
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
