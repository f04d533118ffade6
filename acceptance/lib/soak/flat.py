"""Memory, files and threads of a process, and a test that they do not grow from cycle to cycle."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

WARM_UP = 3  # samples of each process that do not count: caches fill, and every code path is used once
ENOUGH = 4  # samples after the warm-up that a slope needs


class Bound(NamedTuple):
    """A quantity, by its name in tables, grows if its slope is above ``per_1000`` in 1,000 cycles, and if it has grown
    by more than ``noise`` from the first to the last sample of the fitted line. cycles: a shorter line says nothing.
    Memory settles slowly: a run without kills alone shows whether that of a process which is killed early grows."""

    name: str
    per_1000: float
    noise: float
    cycles: int = 0


BOUNDS = {
    "rss_mb": Bound("resident memory, MB", 40.0, 8.0, 150),
    "pss_mb": Bound("proportional memory, MB", 40.0, 8.0, 150),
    "threads": Bound("threads", 5.0, 2.5),
    "files": Bound("open files", 5.0, 2.9),
    "sockets": Bound("open sockets", 20.0, 16.0),
    "folder_files": Bound("files", 5.0, 2.5),
    # From its first upload on, each API server keeps two files of 64 MiB.
    "folder_mb": Bound("bytes of files, MB", 40.0, 140.0),
    "shm_files": Bound("segments", 2.0, 1.5),
    "shm_mb": Bound("bytes of segments, MB", 5.0, 3.0),
    "kv_blocks": Bound("KV blocks in use", 0.0, 0.0),
}


class Series(NamedTuple):
    """One quantity of one process. pid: 0 for what belongs to no process. cycles, values: the samples. slope: growth in
    1,000 cycles after the warm-up; None with too few samples."""

    role: str
    pid: int
    quantity: str
    cycles: list[int]
    values: list[float]

    @property
    def slope(self) -> float | None:
        if len(self.values) < WARM_UP + ENOUGH:
            return None
        return 1000.0 * float(np.polyfit(self.cycles[WARM_UP:], self.values[WARM_UP:], 1)[0])

    @property
    def grows(self) -> bool:
        """Whether this is a leak, by BOUNDS."""
        slope, bound = self.slope, BOUNDS[self.quantity]
        if slope is None or slope <= bound.per_1000:
            return False
        span = self.cycles[-1] - self.cycles[WARM_UP]
        return span >= bound.cycles and slope * span / 1000.0 > bound.noise


class Samples:
    """All series of a soak. Another process of the same role has series of its own, so that its baseline is new."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, int, str], Series] = {}

    def add(self, cycle: int, role: str, pid: int, values: dict[str, float]) -> None:
        """Add a sample of a process (pid 0: of no process)."""
        for quantity, value in values.items():
            key = role, pid, quantity
            series = self._series.setdefault(key, Series(role, pid, quantity, [], []))
            series.cycles.append(cycle)
            series.values.append(value)

    def problems(self) -> list[str]:
        """Return what grows."""
        return [
            f"{s.role} (pid {s.pid}): {s.quantity} grows by {s.slope:.1f} in 1,000 cycles "
            f"({s.values[WARM_UP]:.1f} in cycle {s.cycles[WARM_UP]}, {s.values[-1]:.1f} in cycle {s.cycles[-1]})"
            for s in self._series.values()
            if s.grows
        ]

    def summary(self) -> list[dict[str, float | str | int | None]]:
        """Return one row for each role and quantity: number of processes, samples, least and greatest value after the
        warm-up, and the steepest slope."""
        groups: dict[tuple[str, str], list[Series]] = defaultdict(list)
        for s in self._series.values():
            groups[s.role, s.quantity].append(s)
        rows: list[dict[str, float | str | int | None]] = []
        for (role, quantity), found in groups.items():
            values = [v for s in found for v in s.values[WARM_UP:]] or [v for s in found for v in s.values]
            # The longest-lived process tells most: a slope over few cycles is mostly noise.
            longest = max(found, key=lambda s: s.cycles[-1] - s.cycles[0])
            rows.append(
                {
                    "role": role,
                    "quantity": quantity,
                    "processes": len(found),
                    "samples": sum(len(s.values) for s in found),
                    "least": min(values),
                    "greatest": max(values),
                    "longest_cycles": longest.cycles[-1] - longest.cycles[0],
                    "slope_per_1000": longest.slope,
                }
            )
        return rows


def process_holds(pid: int) -> dict[str, float]:
    """Return memory, threads and descriptors of a process. Raises OSError if it is gone. rss_mb, pss_mb: MB of 10^6
    bytes; pss counts shared pages in proportion."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    rollup = (folder / "smaps_rollup").read_text()
    pss_kib = int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
    sockets = files = 0
    for fd in (folder / "fd").iterdir():
        try:
            is_socket = os.readlink(fd).startswith("socket:")
        except FileNotFoundError:  # closed since the folder was listed
            continue
        sockets, files = sockets + is_socket, files + (not is_socket)
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) * 1024 / 1e6,
        "pss_mb": pss_kib * 1024 / 1e6,
        "threads": float(status["Threads"]),
        "files": float(files),
        "sockets": float(sockets),
    }


def files_under(paths: Iterable[Path]) -> tuple[int, float]:
    """Return the number of regular files at or below ``paths``, and their MB. Files that vanish meanwhile are left
    out."""
    count, nbytes = 0, 0
    for top in paths:
        for path in [top, *top.rglob("*")]:
            try:
                if path.is_file():
                    count, nbytes = count + 1, nbytes + path.stat().st_size
            except OSError:
                continue
    return count, nbytes / 1e6
