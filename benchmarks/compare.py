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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.client import Client
from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison, machine_line
from benchmarks.lib.contenders import READY_S, Contender, RunningEngines
from benchmarks.lib.engines import ENGINES, Engine, installed
from benchmarks.lib.loads import LOADS, Figures, Load
from benchmarks.lib.report import Printer, json_flag, some_of, write_json
from benchmarks.lib.roofline import Machine, Shape, probe

SERVED = "q05"
Prober = Callable[[], Machine | None]


async def run_loads(
    contender: Contender, loads: Sequence[Load], model: str, seed: str
) -> list[tuple[Figures, float | None]]:
    """Return the client's figures of each load, and the engine's own mean time between tokens, in seconds. Raises as
    ``Contender.run``."""

    async def work(client: Client) -> list[tuple[Figures, float | None]]:
        found = []
        for load in loads:
            sum_before, count_before = await contender.token_metric()
            figures = await load.run(client, model, f"{load.name}/{seed}")
            sum_after, count_after = await contender.token_metric()
            count = count_after - count_before
            found.append((figures, (sum_after - sum_before) / count if count else None))
        return found

    return await contender.run(work)


async def compare(
    running: RunningEngines, loads: Sequence[Load], model: str, repeats: int, prober: Prober
) -> list[LoadComparison]:
    """Return the comparison of each load. In each repeat, each engine gets all loads, one after the other."""
    runs: dict[Contender, list[list[tuple[Figures, float | None]]]] = {found: [] for found in running.contenders}
    probes: list[Machine | None] = []
    for contender in list(running.contenders):
        with running.removed_on_failure(contender):
            await run_loads(contender, [load.warm_up() for load in loads], model, "warm-up")
    for repeat in range(repeats):
        probes.append(prober())
        for contender in list(running.contenders):
            with running.removed_on_failure(contender):
                runs[contender].append(await run_loads(contender, loads, model, str(repeat)))
    probes.append(prober())
    found = []
    for number, load in enumerate(loads):
        measured = []
        for contender in running.contenders:
            mine = [repeat[number] for repeat in runs[contender]]
            own = tuple(token_s for _, token_s in mine if token_s is not None)
            measured.append(EngineRuns(contender.engine.name, tuple(figures for figures, _ in mine), own))
        found.append(LoadComparison(load, tuple(measured), tuple(one for one in probes if one is not None)))
    return found


def run(
    engines: Sequence[Engine], loads: Sequence[Load], args: argparse.Namespace, printer: Printer, prober: Prober = probe
) -> int:
    shape = Shape.of(args.model_path)
    done: list[LoadComparison] = []
    running = RunningEngines(printer.say)
    with running.started(engines, READY_S):
        for load in loads:
            began = time.perf_counter()
            done += asyncio.run(compare(running, [load], SERVED, args.repeats, prober))
            printer.say(f"load {load.name}: {time.perf_counter() - began:.0f} s; {machine_line(done[-1].probes)}")
            write_json(args, to_json(running.contenders, done, shape))
        for contender in running.contenders:
            if contender.frozen:
                printer.say(f"{contender.engine.name} never rests: stopped while others are measured")
    rows = [row for compared in done for row in compared.rows(shape)]
    printer.table(f"{args.model_path.name}, medians of {args.repeats}", HEADER, rows)
    printer.say(machine_line([found for compared in done for found in compared.probes]))
    return printer.failed([error for compared in done for error in compared.errors])


def to_json(contenders: Sequence[Contender], done: Sequence[LoadComparison], shape: Shape) -> dict[str, Any]:
    return {
        "step_bytes": shape.step_bytes,
        "engines": {
            c.engine.name: {"version": c.engine.version, "ready_s": c.ready_s, "frozen": c.frozen} for c in contenders
        },
        "loads": [compared.to_json() for compared in done],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    ratios = "ratios are to the first one (default: ours and every peer that is installed)"
    add("--engines", type=some_of(ENGINES), default=list(ENGINES), help=ratios)
    add("--loads", type=some_of(LOADS), default=list(LOADS), help=f"default: {','.join(LOADS)}")
    add("--repeats", type=int, default=3)
    json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    engines = installed(args.engines, args.model_path, SERVED, printer.say)
    loads = [LOADS[name] for name in args.loads]
    return printer.exit_code(lambda: run(engines, loads, args, printer)) if engines else 2


if __name__ == "__main__":
    sys.exit(main())
