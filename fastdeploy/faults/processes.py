"""Deaths and stops of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path


def kill(pid: int) -> None:
    """Kill a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """Return the parent of a process. Raises OSError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, thread.read_text().split())
    return [pid] + [member for child in children for member in family(child)]


def freeze(pids: Iterable[int], seconds: float) -> None:
    """Stop processes, and let a program of its own continue them after ``seconds``, since this process may be among
    them or may die."""
    chosen = sorted(pids, key=lambda pid: pid == os.getpid())  # this process stops last
    script = 'sleep "$0"; kill -CONT "$@" 2>/dev/null'
    subprocess.Popen(["/bin/sh", "-c", script, str(seconds), *map(str, chosen)], start_new_session=True)
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
