"""The processes of a server: which they are, what CPU time they have had, and signals to all of them. Linux only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from the third field on. Raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def session_processes(leader: int) -> list[int]:
    """The process ids of a session, so of everything a server started with ``start_new_session`` that did not leave."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(_fields(int(entry.name))[3]) == leader:
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return sorted(found)


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that these processes have had so far, all threads; those that have ended count nothing."""
    ticks = 0
    for pid in pids:
        try:
            ticks += sum(map(int, _fields(pid)[11:13]))
        except OSError:
            continue
    return ticks / TICKS_PER_S


def send_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
