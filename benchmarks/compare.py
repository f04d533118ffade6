#!/usr/bin/env python
"""Compare this engine with its peers: speed under the same loads, time and memory of a start and of an update.

    python benchmarks/compare.py --model-path ~/.cache/fastdeploy-peers/q05 --json compare.json --markdown compare.md
    python benchmarks/compare.py --model-path ... --engines ours,vllm --loads 1,8 --repeats 5
    python benchmarks/compare.py --model-path ... --loads long --max-model-len 32768 --kv-cache-gb 4 --apart

All engines are started here and run during the whole comparison, so that a drift of the machine's speed affects all. In
each repeat the machine is probed, then each engine gets the load in turn, with new prompts. An engine starts when the
previous one uses no more CPU. An engine that never becomes idle is stopped (SIGSTOP) while others are measured. Where
memory holds only one engine, ``--apart`` runs one after the other instead. A peer that cannot be started, or that ends,
is removed, and the end of its log is printed. Exits 1 if a request failed, 2 if the first engine cannot be started or
driven.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison, machine_line
from benchmarks.lib.contenders import READY_S, Contender, RunningEngines
from benchmarks.lib.costs import HEADER as COSTS_HEADER
from benchmarks.lib.costs import Costs, costs_of
from benchmarks.lib.docs_tables import document
from benchmarks.lib.engines import DEFAULT_LIMITS, ENGINES, Engine, Limits, installed
from benchmarks.lib.loads import DEFAULT_LOADS, LOAD_NAMES, Figures, Load, loads_of
from benchmarks.lib.report import Printer, json_flag, some_of, write_json
from benchmarks.lib.roofline import Machine, Shape, probe
from fastdeploy.bench.client import FAILURES, Client

SERVED = "q05"
Prober = Callable[[], Machine]


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
    probes: list[Machine] = []
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
        found.append(LoadComparison(load, tuple(measured), tuple(probes)))
    return found


@dataclass
class Results:
    """What was measured so far. loads: by name, in order."""

    shape: Shape
    loads: dict[str, LoadComparison] = field(default_factory=dict)
    costs: list[Costs] = field(default_factory=list)

    def add(self, compared: LoadComparison) -> None:
        """Add a load, or further engines of it."""
        before = self.loads.get(compared.load.name)
        self.loads[compared.load.name] = compared if before is None else before.joined(compared)

    def to_json(self) -> dict[str, Any]:
        return to_json({one.engine: asdict(one) for one in self.costs}, list(self.loads.values()), self.shape)


def run(
    engines: Sequence[Engine], loads: Sequence[Load], args: argparse.Namespace, printer: Printer, prober: Prober = probe
) -> int:
    results = Results(Shape.of(args.model_path))
    for together in [[engine] for engine in engines] if args.apart else [list(engines)]:
        try:
            run_together(together, loads, args, printer, prober, results)
        except FAILURES as error:
            if engines[0] in together:
                raise
            printer.say(f"without {together[0].name}: {error or type(error).__name__}")
    done, shape = list(results.loads.values()), results.shape
    rows = [row for compared in done for row in compared.rows(shape)]
    printer.table(f"{args.model_path.name}, medians of {args.repeats}", HEADER, rows)
    printer.table("start, memory, update", COSTS_HEADER, [one.row() for one in results.costs])
    printer.say(machine_line([found for compared in done for found in compared.probes]))
    if args.markdown:
        command = shlex.join(["python", "benchmarks/compare.py", *args.arguments])
        args.markdown.write_text(document(done, results.costs, shape, args.model_path, command))
    return printer.failed([error for compared in done for error in compared.errors])


def run_together(
    engines: Sequence[Engine],
    loads: Sequence[Load],
    args: argparse.Namespace,
    printer: Printer,
    prober: Prober,
    results: Results,
) -> None:
    """Run these engines at the same time, and add what is measured to the results."""
    running = RunningEngines(printer.say)
    with running.started(engines, READY_S):
        for load in loads:
            began = time.perf_counter()
            [compared] = asyncio.run(compare(running, [load], SERVED, args.repeats, prober))
            printer.say(f"load {load.name}: {time.perf_counter() - began:.0f} s; {machine_line(compared.probes)}")
            results.add(compared)
            write_json(args, results.to_json())
        for contender in list(running.contenders):
            with running.removed_on_failure(contender):
                results.costs.append(asyncio.run(costs_of(contender, args.model_path, args.repeats)))
            if contender.frozen:
                printer.say(f"{contender.engine.name} never rests: stopped while others are measured")
    write_json(args, results.to_json())


def to_json(engines: Mapping[str, Any], done: Sequence[LoadComparison], shape: Shape) -> dict[str, Any]:
    """Return the content of the file of ``--json``. engines: what is known of each, by name."""
    return {
        "step_bytes": shape.step_bytes(1),
        "engines": dict(engines),
        "loads": [compared.to_json() for compared in done],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder, with one model.safetensors")
    ratios = "ratios are to the first one (default: ours and every peer that is installed)"
    add("--engines", type=some_of(ENGINES), default=list(ENGINES), help=ratios)
    default = [load.name for load in DEFAULT_LOADS]
    add("--loads", type=some_of(LOAD_NAMES), default=default, help=f"of {','.join(LOAD_NAMES)}; default: all but long")
    add("--repeats", type=int, default=3)
    add("--max-model-len", type=int, default=DEFAULT_LIMITS.context, help="tokens of a sequence (%(default)s)")
    add("--kv-cache-gb", type=int, default=DEFAULT_LIMITS.kv_gb, help="of each engine (%(default)s)")
    add("--apart", action="store_true", help="one engine at a time, for large models")
    add("--markdown", type=Path, metavar="FILE", help="write the tables of docs/benchmarks.md")
    json_flag(parser)
    args = parser.parse_args(argv)
    args.arguments = sys.argv[1:] if argv is None else list(argv)
    for load in loads_of(args.loads, args.max_model_len):
        if load.prompt < 1 or load.prompt + load.output > args.max_model_len:
            parser.error(f"--max-model-len: load {load.name} needs more than {args.max_model_len} tokens")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    limits = Limits(context=args.max_model_len, kv_gb=args.kv_cache_gb)
    engines = installed(args.engines, args.model_path, SERVED, printer.say, limits)
    loads = loads_of(args.loads, args.max_model_len)
    return printer.exit_code(lambda: run(engines, loads, args, printer)) if engines else 2


if __name__ == "__main__":
    sys.exit(main())
