"""The state of other processes on this machine."""

from __future__ import annotations

from pathlib import Path

DEAD_OR_STOPPED = "ZXxTt"  # of the states in man 5 proc: zombie, dead, stopped by a signal, stopped by a debugger


def process_runs(pid: int) -> bool:
    """Return whether the process ``pid`` lives and is not stopped. A process that waits or computes runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in DEAD_OR_STOPPED
