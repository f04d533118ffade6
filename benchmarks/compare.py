#!/usr/bin/env python
"""Compare this engine with its peers under the same loads: medians, ratios, and the share of the roofline.

    python benchmarks/compare.py --model-path ~/.cache/fastdeploy-peers/q05 --json compare.json
    python benchmarks/compare.py --model-path ... --engines ours,vllm --loads 1,8 --repeats 5

All engines are started here and run during the whole comparison, so that a drift of the machine's speed affects all. In
each repeat the machine is probed, then each engine gets the load in turn, with new prompts. An engine starts when the
previous one uses no more CPU. An engine that never becomes idle is stopped (SIGSTOP) while others are measured. A peer
that cannot be started, or that ends, is removed, and the end of its log is printed. Exits 1 if a request failed, 2 if
the first engine cannot be started or driven.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.client import Client
from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison, machine_line
from benchmarks.lib.dialect import FAILURES, read_metrics
from benchmarks.lib.engines import ENGINES, Engine
from benchmarks.lib.loads import LOADS, Figures, Load
from benchmarks.lib.processes import cpu_seconds, send_all
from benchmarks.lib.report import Printer, machine, write_json
from benchmarks.lib.roofline import Machine, Shape, probe
from benchmarks.lib.server import ServerProcess

STOP_S = 15.0
ENDING_S = 2.0  # limit of the wait for the end of a server whose connections have broken
IDLE_CORES = 0.05  # a server that uses more of a core is not idle
WATCH_S, REST_S = 0.5, 10.0  # length of one measurement of CPU use; limit of the wait for an idle server

Prober = Callable[[], Machine | None]


class Contender:
    """One engine's running server. rest_s: longest time from its last answer until it was idle. frozen: stopped by
    SIGSTOP until its next load, since it did not become idle."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.server = ServerProcess(engine.command, folder)
        self.client = Client(self.server.url)
        self.ready_s = self.rest_s = 0.0
        self.frozen = False

    @property
    def idle_description(self) -> str:
        """A sentence about the server's CPU use between loads."""
        name = self.engine.name
        if self.frozen:
            return f"{name} never rests: stopped while others are measured"
        return f"{name} rests within {self.rest_s + WATCH_S:.1f} s of its last answer"

    async def start(self, ready_s: float) -> None:
        """Wait until the server is ready and idle. Raises ServerError if it is not ready after ``ready_s`` seconds."""
        self.ready_s = await self.server.wait_ready(ready_s, self.engine.ready)
        await self.wait_idle()
        self.rest_s = 0.0

    def close(self) -> None:
        self.unfreeze()
        self.server.stop(STOP_S)
        self.server.kill()

    def unfreeze(self) -> None:
        if self.frozen:
            send_all(self.server.processes(), signal.SIGCONT)
            self.frozen = False

    async def wait_idle(self) -> None:
        """Wait until the server uses no more CPU; freeze it if it still does after REST_S."""
        start, processes = time.perf_counter(), self.server.processes()
        while (spent := time.perf_counter() - start) < REST_S:
            before = cpu_seconds(processes)
            await asyncio.sleep(WATCH_S)
            if cpu_seconds(processes) - before <= IDLE_CORES * WATCH_S:
                break
        else:
            send_all(processes, signal.SIGSTOP)
            self.frozen = True
        self.rest_s = max(self.rest_s, spent)

    async def token_metric(self) -> tuple[float, float]:
        """Return sum and count of the engine's own histogram of the time between tokens; zeros if it has none."""
        if self.engine.token_metric is None:
            return 0.0, 0.0
        values = read_metrics((await self.client.call("GET", "/metrics")).body)
        name = self.engine.token_metric
        return values.get(f"{name}_sum", 0.0), values.get(f"{name}_count", 0.0)

    async def run_load(self, load: Load, model: str, seed: str) -> tuple[Figures, float | None]:
        """Return the client's figures, and the engine's own mean time between tokens, in seconds.

        Raises ServerError, WireError, OSError or TimeoutError if the server ends or cannot be driven."""
        self.unfreeze()
        sum_before, count_before = await self.token_metric()
        try:
            figures = await load.run(self.client, model, seed)
        except FAILURES:  # a process that dies closes its connections before its exit status is known
            self.server.require_running(ENDING_S)
            raise
        self.server.require_running()
        sum_after, count_after = await self.token_metric()
        await self.wait_idle()
        count = count_after - count_before
        return figures, (sum_after - sum_before) / count if count else None


class RunningEngines:
    """The engines that are compared. The first one is the base of all ratios. Another one that cannot be started, or
    that ends, is removed, and ``say`` gets the reason."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.contenders: list[Contender] = []
        self._say = say

    @contextmanager
    def started(self, engines: Sequence[Engine], ready_s: float) -> Iterator[None]:
        """Start the servers one after the other, to time each start. Stop all of them at the end."""
        with tempfile.TemporaryDirectory(prefix="compare-") as name:
            try:
                for engine in engines:
                    folder = Path(name) / engine.name
                    folder.mkdir()
                    contender = Contender(engine, folder)
                    self.contenders.append(contender)
                    with self.removed_on_failure(contender):
                        asyncio.run(contender.start(ready_s))
                        self._say(f"{engine.name} {engine.version}: ready after {contender.ready_s:.1f} s")
                yield
            finally:
                for contender in self.contenders:
                    contender.close()

    @contextmanager
    def removed_on_failure(self, contender: Contender) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if contender is self.contenders[0]:
                raise
            self.contenders.remove(contender)
            contender.close()
            self._say(f"without {contender.engine.name}: {error or type(error).__name__}")


async def compare(
    running: RunningEngines, load: Load, model: str, seed: str, repeats: int, prober: Prober
) -> LoadComparison:
    runs: dict[Contender, list[tuple[Figures, float | None]]] = {contender: [] for contender in running.contenders}
    probes: list[Machine | None] = []

    for contender in list(running.contenders):
        with running.removed_on_failure(contender):
            await contender.run_load(load.warm_up(), model, f"{seed}/{load.name}/warm-up")
    for repeat in range(repeats):
        probes.append(prober())
        for contender in list(running.contenders):
            with running.removed_on_failure(contender):
                runs[contender].append(await contender.run_load(load, model, f"{seed}/{load.name}/{repeat}"))
    probes.append(prober())
    measured = [
        EngineRuns(
            contender.engine.name,
            tuple(figures for figures, _ in runs[contender]),
            tuple(own for _, own in runs[contender] if own is not None),
        )
        for contender in running.contenders
    ]
    return LoadComparison(load, tuple(measured), tuple(found for found in probes if found is not None))


def run(
    engines: Sequence[Engine], loads: Sequence[Load], args: argparse.Namespace, printer: Printer, prober: Prober = probe
) -> int:
    shape = Shape.of(args.model_path)
    done: list[LoadComparison] = []
    running = RunningEngines(printer.say)
    with running.started(engines, args.ready_s):
        for load in loads:
            began = time.perf_counter()
            done.append(asyncio.run(compare(running, load, args.served_model_name, args.seed, args.repeats, prober)))
            printer.say(f"load {load.name}: {time.perf_counter() - began:.0f} s; {machine_line(done[-1].probes)}")
            if args.json:
                write_json(args.json, to_json(running.contenders, done, shape, args))
        for contender in running.contenders:
            printer.say(contender.idle_description)
    rows = [row for compared in done for row in compared.rows(shape)]
    printer.table(f"{args.model_path.name}, medians of {args.repeats}", HEADER, rows)
    printer.say(machine_line([found for compared in done for found in compared.probes]))
    errors = [error for compared in done for error in compared.errors]
    for error in errors:
        printer.say(f"failed: {error}")
    return 1 if errors else 0


def to_json(
    contenders: Sequence[Contender], done: Sequence[LoadComparison], shape: Shape, args: argparse.Namespace
) -> dict[str, Any]:
    return {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(args).items()},
        "step_bytes": shape.step_bytes,
        "engines": {
            c.engine.name: {"version": c.engine.version, "ready_s": c.ready_s, "rest_s": c.rest_s, "frozen": c.frozen}
            for c in contenders
        },
        "loads": [compared.to_json(shape) for compared in done],
    }


def chosen(text: str, known: Iterable[str]) -> list[str]:
    """Split a comma-separated list of known names. Raises ArgumentTypeError."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, each once; got {text!r}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    add("--served-model-name", default="q05")
    ratios = "ratios are to the first one (default: ours and every peer that is installed)"
    add("--engines", type=lambda text: chosen(text, ENGINES), default=list(ENGINES), help=ratios)
    add("--loads", type=lambda text: chosen(text, LOADS), default=list(LOADS), help=f"default: {','.join(LOADS)}")
    add("--repeats", type=int, default=3)
    add("--seed", default="0", help="of the prompts")
    add("--ready-s", type=float, default=600.0, help="limit of an engine's start, in seconds (%(default)g)")
    add("--json", metavar="FILE", help="written after every load")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    printer = Printer()
    engines = [ENGINES[name](args.model_path, args.served_model_name) for name in args.engines]
    for engine in engines:
        if engine.missing:
            printer.say(f"without {engine.name}: {engine.missing}")
    engines = [engine for engine in engines if not engine.missing]
    if not engines:
        return 2
    try:
        return run(engines, [LOADS[name] for name in args.loads], args, printer)
    except (*FAILURES, subprocess.CalledProcessError) as error:
        printer.say(f"cannot go on: {type(error).__name__}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
