#!/usr/bin/env python
"""Measure decoding with 1, 8 and 32 distinct adapters against the base model alone, beside vLLM with LoRA.

    python benchmarks/adapters.py --model-path ~/.cache/fastdeploy-peers/q05 --json adapters.json
    python benchmarks/adapters.py --model-path ... --engines ours --repeats 9
    python benchmarks/adapters.py --model-path ... --only tenants --cycles 10

Starts two servers of each engine: one with adapters loaded, one without. All run during the whole measurement; in each
repeat every server gets its loads in turn, while the others are idle. Random adapters (make_adapters.py) are on all
linears. Three tables are printed:

- decoding: tokens per second while all streams decode, by number of distinct adapters. "bound" is the ratio that is
  left if an adapter costs only the time to read it: base step / (base step + bytes of the adapters / read bandwidth).
- base requests: the server with adapters loaded against the one without.
- tenants: the time between tokens of B while A, on the same server, is paused, loaded in place, and resumed. vLLM
  cannot pause one adapter: it only loads.

Exits 1 if a request failed or two adapters gave the same answer, 2 if the first engine cannot be started or driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.adapter_calls import load_adapter
from benchmarks.lib.adapter_decoding import Streams, adapter_name, check_adapters
from benchmarks.lib.adapter_report import BASE_HEADER, DECODING_HEADER, TENANTS_HEADER, Results, without
from benchmarks.lib.client import Client
from benchmarks.lib.comparison import machine_line
from benchmarks.lib.contenders import RunningEngines
from benchmarks.lib.engines import SEQUENCES, Engine, installed
from benchmarks.lib.report import Printer, json_flag, numbers, some_of, write_json
from benchmarks.lib.roofline import Machine, Shape, probe
from benchmarks.lib.tenants import Tenants
from benchmarks.make_adapters import adapter_bytes, write_adapter

BASE = "base"
VERSIONS = 2  # of the first adapter, which its tenant loads in turn
WARM_UP_TOKENS = 8
TOO_SHORT = "a stream had ended when the last one began; raise --output-len"
PARTS = DECODING, TENANTS = "decoding", "tenants"
Prober = Callable[[], Machine | None]
# Flags for adapters by engine, from (number of adapters, rank, bytes of one adapter).
LORA: dict[str, Callable[[int, int, int], tuple[str, ...]]] = {
    "ours": lambda count, rank, size: (
        "--max-lora-rank", str(rank), "--adapter-memory-mb", str((2 * count * size >> 20) + 1)
    ),
    "vllm": lambda count, rank, size: (
        "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(count), "--max-cpu-loras", str(2 * count)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """An engine and its loads. counts: numbers of distinct adapters. 0 comes last, so that the two servers of an engine
    decode with the base model one right after the other. scoped: see Tenants."""

    engine: Engine
    counts: tuple[int, ...] = (0,)
    scoped: bool = False

    @property
    def has_adapters(self) -> bool:
        return self.counts != (0,)


def adapters_loaded(counts: Sequence[int]) -> int:
    """Return how many adapters a server has loaded: enough for all rounds, and for two tenants."""
    return max(*counts, 2)


def servers_of(engines: Sequence[Engine], args: argparse.Namespace) -> list[Server]:
    """Return two servers of each engine: with adapters and without."""
    size = adapter_bytes(Shape.of(args.model_path), args.rank)
    counts = (*sorted(args.counts, reverse=True), 0)
    found = []
    for plain in engines:
        flags = LORA[plain.name](adapters_loaded(args.counts), args.rank, size)
        found.append(Server(replace(plain, command=plain.command + flags), counts, scoped=plain.name == "ours"))
        found.append(Server(replace(plain, name=without(plain.name))))
    return found


class Measurement:
    """The loads of all servers, in turn. folders: a PEFT folder for each adapter, then two more versions of the first
    adapter."""

    def __init__(
        self,
        args: argparse.Namespace,
        servers: dict[str, Server],
        folders: Sequence[Path],
        running: RunningEngines,
        prober: Prober,
    ):
        shape = Shape.of(args.model_path)
        self.results = Results(shape.step_bytes, adapter_bytes(shape, args.rank))
        self._args = args
        self._servers = servers
        self._folders = folders
        self._running = running
        self._prober = prober

    async def run(self, say: Callable[[str], None]) -> None:
        """Measure everything that --only names."""
        await self._each(self._prepare)
        if DECODING in self._args.only:
            for repeat in range(self._args.repeats):
                self._probe()
                await self._each(partial(self._decode, repeat))
                say(f"decoding: repeat {repeat + 1} of {self._args.repeats}; tokens/s: {self._last_speeds()}")
            self._probe()
        if TENANTS in self._args.only:
            await self._each(self._tenants)

    async def _each(self, work: Callable[[Server, Client], Awaitable[None]]) -> None:
        for contender in list(self._running.contenders):
            server = self._servers[contender.engine.name]
            with self._running.removed_on_failure(contender):
                await contender.run(partial(work, server))
        gone = self.results.rounds.keys() - {contender.engine.name for contender in self._running.contenders}
        for name in gone:
            del self.results.rounds[name]

    async def _prepare(self, server: Server, client: Client) -> None:
        """Load and check the adapters; warm up."""
        if server.has_adapters:
            loaded = len(self._folders) - VERSIONS
            for number in range(loaded):
                await load_adapter(client, adapter_name(number), self._folders[number])
            self._note(server, await check_adapters(client, BASE, loaded))
        for count in server.counts:
            found = await self._streams(WARM_UP_TOKENS).run(client, count, f"{self._args.seed}/warm-up/{count}")
            self._note(server, found.errors)

    async def _decode(self, repeat: int, server: Server, client: Client) -> None:
        for count in server.counts:
            streams = self._streams(self._args.output_len)
            found = await streams.run(client, count, f"{self._args.seed}/{repeat}/{count}")
            self._note(server, found.errors if found.errors or found.step_s else [TOO_SHORT])
            self.results.rounds.setdefault(server.engine.name, {}).setdefault(count, []).append(found)

    async def _tenants(self, server: Server, client: Client) -> None:
        if not server.has_adapters:
            return
        args, names = self._args, (adapter_name(0), adapter_name(1))
        versions = self._folders[-VERSIONS:]
        tenants = Tenants(names, versions, args.streams, args.input_len, args.quiet_s, args.cycles, server.scoped)
        gaps, errors = await tenants.run(client, f"{args.seed}/tenants")
        self.results.tenants[server.engine.name] = gaps
        self._note(server, errors)

    def _last_speeds(self) -> str:
        """Return the speed of each server in its last round, by number of adapters."""
        return "; ".join(
            f"{name} "
            + ", ".join(
                f"{count}: {found[-1].tokens_per_s:.0f}" for count, found in by_count.items() if found[-1].step_s
            )
            for name, by_count in self.results.rounds.items()
        )

    def _streams(self, output: int) -> Streams:
        return Streams(BASE, self._args.streams, self._args.input_len, output)

    def _note(self, server: Server, errors: Sequence[str]) -> None:
        self.results.errors += [f"{server.engine.name}: {error}" for error in errors]

    def _probe(self) -> None:
        found = self._prober()
        if found is not None:
            self.results.probes.append(found)


def write_folders(args: argparse.Namespace, parent: Path) -> list[Path]:
    """Write the adapters that a measurement needs; see Measurement."""
    folders = [parent / adapter_name(number) for number in range(adapters_loaded(args.counts) + VERSIONS)]
    for number, folder in enumerate(folders):
        write_adapter(folder, Shape.of(args.model_path), args.rank, number)
    return folders


def run(servers: Sequence[Server], args: argparse.Namespace, printer: Printer, prober: Prober = probe) -> int:
    running = RunningEngines(printer.say)
    by_name = {server.engine.name: server for server in servers}
    with tempfile.TemporaryDirectory(prefix="adapters-") as parent:
        folders = write_folders(args, Path(parent))
        with running.started([server.engine for server in servers], args.ready_s):
            measurement = Measurement(args, by_name, folders, running, prober)
            asyncio.run(measurement.run(printer.say))
            for contender in running.contenders:
                printer.say(contender.idle_description)
    results = measurement.results
    title = f"{args.model_path.name}, {args.streams} streams, rank {args.rank} on all linears"
    if DECODING in args.only:
        medians = f"medians of {args.repeats}"
        printer.table(f"decoding: {title}, {medians}", DECODING_HEADER, results.decoding_rows())
        printer.table(f"base requests: {args.streams} streams, {medians}", BASE_HEADER, results.base_rows())
        printer.say(machine_line(results.probes))
    if TENANTS in args.only:
        printer.table(f"tenants: {title}, half A, half B", TENANTS_HEADER, results.tenant_rows())
    versions = {server.engine.name: server.engine.version for server in servers}
    write_json(args, {"engines": versions} | results.to_json())
    return printer.failed(results.errors)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    add("--engines", type=some_of(LORA), default=list(LORA), help="default: ours and vLLM, if it is installed")
    add("--only", type=some_of(PARTS), default=list(PARTS), help=f"default: {','.join(PARTS)}")
    add("--counts", type=numbers, default=[1, 8, 32], help="distinct adapters (default: 1,8,32)")
    add("--rank", type=int, default=16)
    add("--streams", type=int, default=SEQUENCES, help="at once (%(default)s, as many as the engines run)")
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=64)
    add("--repeats", type=int, default=5)
    add("--cycles", type=int, default=5, help="of the tenants' part")
    add("--quiet-s", type=float, default=2.0, help="length of its phases without a call, in seconds")
    add("--seed", default="0", help="of the prompts")
    add("--ready-s", type=float, default=600.0, help="limit of an engine's start, in seconds (%(default)g)")
    json_flag(parser)
    args = parser.parse_args(argv)
    if not 2 <= args.streams <= SEQUENCES or max(args.counts) > args.streams:
        parser.error(f"--streams: 2 to {SEQUENCES}, and at least as many as adapters")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    servers = servers_of(installed(args.engines, args.model_path, BASE, printer.say), args)
    return printer.exit_code(lambda: run(servers, args, printer)) if servers else 2


if __name__ == "__main__":
    sys.exit(main())
