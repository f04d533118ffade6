"""The processes of a server: their ids, their CPU time, and signals to all of them. Linux only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
