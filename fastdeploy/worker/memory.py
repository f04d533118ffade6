"""Memory of this process and of the machine, as Linux reports it."""

from __future__ import annotations

import ctypes
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that this process may still allocate: those free on the machine, or in its cgroup if fewer."""
    free = _of_machine("MemAvailable")
    in_cgroup = _free_in_cgroup(CGROUP)
    return free if in_cgroup is None else min(free, in_cgroup)


def total_memory() -> int:
    """Return the bytes of the machine's memory, or the limit of this cgroup if that is less."""
    total, limit = _of_machine("MemTotal"), _cgroup_limit(CGROUP)
    return total if limit is None else min(total, limit)


def _of_machine(name: str) -> int:
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo[name].split()[0]) * 1024


def _cgroup_limit(folder: Path) -> int | None:
    """Return the bytes that a cgroup (version 2) may have; None without a limit."""
    limit = folder / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return None if text == "max" else int(text)


def _free_in_cgroup(folder: Path) -> int | None:
    """Return the bytes that a cgroup may still allocate; None without a limit. Files that were read count as used
    memory, but those that are not in use (inactive_file) give way."""
    if (limit := _cgroup_limit(folder)) is None:
        return None
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
    return max(limit - max(used, 0), 0)


def resident_memory() -> int:
    """Return the bytes of this process that are in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def give_back_freed_memory() -> None:
    """Return freed memory that the C allocator kept, mostly of small tensors, to the system. Needs glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
