#!/usr/bin/env python
"""Measure decoding with 1, 8 and 32 distinct adapters against the base model alone, beside vLLM with LoRA.

    python benchmarks/adapters.py --model-path ~/.cache/fastdeploy-peers/q05 --json adapters.json
    python benchmarks/adapters.py --model-path ... --engines ours --repeats 9

Starts one server of each engine, with all adapters loaded. In each repeat every server gets all loads in turn, while
the others are idle. Random adapters (make_adapters.py) are on all linears. Stream i uses adapter i modulo the number of
distinct adapters. The table is that of compare.py, with two more columns. "of base only" is the decoding speed over
that of the base model alone on the same server. "bound" is this ratio if an adapter costs only the time to read it.

Exits 1 if a request failed or two adapters gave the same answer, 2 if the first engine cannot be started or driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compare import Prober, compare, to_json
from benchmarks.lib.comparison import HEADER, LoadComparison, machine_line
from benchmarks.lib.contenders import READY_S, RunningEngines
from benchmarks.lib.engines import DEFAULT_LIMITS, Engine, installed
from benchmarks.lib.loads import AdapterStreams, adapter_name
from benchmarks.lib.report import Printer, json_flag, numbers, optional, some_of, write_json
from benchmarks.lib.roofline import Shape, middle, probe
from benchmarks.make_adapters import adapter_bytes, write_adapter
from fastdeploy.bench.client import Client
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import completion, prompt_ids

BASE = "base"
PROBE_TOKENS = 12  # of each answer that `check_adapters` compares
# Flags for adapters by engine, from (number of adapters, rank, bytes of one adapter).
LORA: dict[str, Callable[[int, int, int], tuple[str, ...]]] = {
    "ours": lambda count, rank, size: (
        "--max-lora-rank", str(rank), "--adapter-memory-mb", str((2 * count * size >> 20) + 1)
    ),
    "vllm": lambda count, rank, size: (
        "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(count), "--max-cpu-loras", str(2 * count)
    ),
}  # fmt: skip


def with_adapters(engine: Engine, args: argparse.Namespace) -> Engine:
    """Return the engine with flags for the adapters of the measurement."""
    size = adapter_bytes(Shape.of(args.model_path), args.rank)
    return replace(engine, command=engine.command + LORA[engine.name](max(args.counts), args.rank, size))


async def prepare(client: Client, folders: Sequence[Path]) -> list[str]:
    """Load the adapters, in vLLM's form, which both servers have. Return the errors of :func:`check_adapters`."""
    for number, folder in enumerate(folders):
        body = {"lora_name": adapter_name(number), "lora_path": str(folder)}
        (await client.call("POST", "/v1/load_lora_adapter", body, 600.0)).checked(f"load of {folder}")
    return await check_adapters(client, len(folders))


async def check_adapters(client: Client, adapters: int) -> list[str]:
    """Return the errors that make a measurement vacuous: two of the models (base and adapters) that give the same
    answer to one prompt."""

    async def answer(model: str) -> StreamLog:
        body = completion(model, prompt_ids("check", 0, 32), PROBE_TOKENS)
        return await (await client.stream("/v1/completions", body, model)).wait_closed()

    seen: dict[tuple[int, ...], str] = {}
    errors = []
    for log in await asyncio.gather(*map(answer, [BASE, *map(adapter_name, range(adapters))])):
        ids, name = tuple(log.token_ids), log.request_id
        if fault := log.fault(PROBE_TOKENS):
            errors.append(f"{name}: {fault}")
        elif ids in seen:
            errors.append(f"{name} answers as {seen[ids]} does")
        else:
            seen[ids] = name
    return errors


def rows(measured: Sequence[LoadComparison], shape: Shape) -> list[tuple[str, ...]]:
    """Return the rows of all loads, the base model alone first."""
    found = []
    machine = middle([probed for compared in measured for probed in compared.probes])
    for compared in measured:
        load = compared.load
        assert isinstance(load, AdapterStreams)
        for base, runs, row in zip(measured[0].engines, compared.engines, compared.rows(shape), strict=True):
            base_s = base.median("token_s")
            bound = None
            if base_s is not None:
                bound = base_s / (base_s + load.adapters * load.adapter_bytes / machine.read)
            found.append((*row, optional(base.over(runs, "token_s"), ".3f"), optional(bound, ".3f")))
    return found


def run(engines: Sequence[Engine], args: argparse.Namespace, printer: Printer, prober: Prober = probe) -> int:
    running, shape = RunningEngines(printer.say), Shape.of(args.model_path)
    size, errors = adapter_bytes(shape, args.rank), list[str]()
    loads = [
        AdapterStreams(f"{count} adapters", args.streams, args.input_len, args.output_len, args.streams, count, size)
        for count in (0, *sorted(args.counts))
    ]
    with tempfile.TemporaryDirectory(prefix="adapters-") as parent:
        folders = [Path(parent) / adapter_name(number) for number in range(max(args.counts))]
        for number, folder in enumerate(folders):
            write_adapter(folder, shape, args.rank, number)
        with running.started([with_adapters(engine, args) for engine in engines], READY_S):

            async def measure() -> list[LoadComparison]:
                for contender in list(running.contenders):
                    with running.removed_on_failure(contender):
                        found = await contender.run(lambda client: prepare(client, folders))
                        errors.extend(f"{contender.engine.name}: {error}" for error in found)
                return await compare(running, loads, BASE, args.repeats, prober)

            measured = asyncio.run(measure())
            versions = {c.engine.name: {"version": c.engine.version} for c in running.contenders}
            write_json(args, to_json(versions, measured, shape))
    title = f"{args.model_path.name}, {args.streams} streams, rank {args.rank} on all linears, {args.repeats} repeats"
    printer.table(title, (*HEADER, "of base only", "bound"), rows(measured, shape))
    printer.say(machine_line(measured[0].probes))
    return printer.failed(errors + [error for compared in measured for error in compared.errors])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    add("--engines", type=some_of(LORA), default=list(LORA), help="default: ours and vLLM, if it is installed")
    add("--counts", type=numbers, default=[1, 8, 32], help="distinct adapters (default: 1,8,32)")
    add("--rank", type=int, default=16)
    add(
        "--streams",
        type=int,
        default=DEFAULT_LIMITS.sequences,
        help="at once (%(default)s, as many as the engines run)",
    )
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=64)
    add("--repeats", type=int, default=5)
    json_flag(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.streams <= DEFAULT_LIMITS.sequences or max(args.counts) > args.streams:
        parser.error(f"--streams: 1 to {DEFAULT_LIMITS.sequences}, and at least as many as adapters")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    engines = installed(args.engines, args.model_path, BASE, printer.say)
    return printer.exit_code(lambda: run(engines, args, printer)) if engines else 2


if __name__ == "__main__":
    sys.exit(main())
