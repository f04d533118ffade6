"""What an engine costs besides its speed: time and memory to start, memory to serve, time and memory of an update."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.lib.checkpoint import Checkpoint
from benchmarks.lib.contenders import Contender
from benchmarks.lib.dialect import DIALECTS
from benchmarks.lib.processes import peak_bytes, reset_peak, resident_bytes
from benchmarks.lib.report import optional
from benchmarks.lib.update import Folder, VllmReload
from fastdeploy.bench.client import Client

HEADER = ("engine", "version", "ready s", "peak GB until ready", "GB serving", "update s", "peak GB in an update")


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes over all processes of the server (pages that two processes share count twice). ready_s: from
    the start of the process until it is ready. start_bytes: the most until then. serving_bytes: after the loads.
    update_s: median of the updates; None if the engine has none. update_bytes: the most in an update."""

    engine: str
    version: str
    ready_s: float
    start_bytes: int
    serving_bytes: int
    update_s: float | None = None
    update_bytes: int | None = None

    def row(self) -> tuple[str, ...]:
        """Return the cells of HEADER."""
        sizes = [optional(size, ".2f", 1e-9) for size in (self.start_bytes, self.serving_bytes, self.update_bytes)]
        return (self.engine, self.version, f"{self.ready_s:.1f}", *sizes[:2], optional(self.update_s, ".2f"), sizes[2])


async def costs_of(contender: Contender, folder: Path, updates: int) -> Costs:
    """Update the idle server so many times from ``folder``, which has the weights that it serves in one safetensors
    file: pause with mode keep, update, resume. Raises as ``Contender.run``."""
    engine, pids = contender.engine, contender.server.processes()
    serving = sum(map(resident_bytes, pids))
    costs = Costs(engine.name, engine.version, contender.ready_s, contender.start_bytes, serving)
    kind = engine.dialect
    if kind is None:
        return costs

    async def update(client: Client) -> tuple[list[float], int]:
        dialect = DIALECTS[kind](client)
        source = (VllmReload if kind == "vllm" else Folder)(client, [Checkpoint(folder.resolve())])
        seconds = []
        reset_peak(pids)
        for number in range(updates):
            began = time.perf_counter()
            await dialect.pause("keep", clear_cache=False, timeout_s=60)
            await source.update(f"update-{number}", "keep")
            await dialect.resume()
            seconds.append(time.perf_counter() - began)
        return seconds, peak_bytes(pids)

    seconds, most = await contender.run(update)
    return Costs(engine.name, engine.version, contender.ready_s, contender.start_bytes, serving, median(seconds), most)
