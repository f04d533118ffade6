#!/usr/bin/env python
"""Measure what a weight update costs running generations: time, bytes and tokens, by source, beside vLLM's reload.

    python benchmarks/weight_update.py --model-path ~/.cache/fastdeploy-peers/q05 --json updates.json
    python benchmarks/weight_update.py --model-path ... --engines ours --only folder,delta --repeats 9

Starts this engine and vLLM. In each repeat, this engine gets every kind of update, live and paused, and then vLLM gets
its reload of the same folder, paused. ``--streams`` generations run on the engine that is measured, for ``--quiet-s``
seconds before the update. Whole updates alternate between a slightly changed copy of the checkpoint and the checkpoint
itself. A folder is in the page cache; folder-on-disk is not. A delta flips the lowest bit of 1 % or 3 % of all values,
at random places. The kind one-set lets the old weights go before it reads the new ones. The memory is the peak during
the calls: that of the engine, and what they put into /dev/shm.

Exits 1 if a stream ended or a token has the wrong version, 2 if the first engine cannot be started or driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.checkpoint import Checkpoint
from benchmarks.lib.contenders import READY_S, RunningEngines
from benchmarks.lib.dialect import DIALECTS
from benchmarks.lib.engines import Engine, installed
from benchmarks.lib.report import Printer, json_flag, some_of, write_json
from benchmarks.lib.update import Delta, Folder, FolderOnDisk, OneSet, SharedMemory, Source, Upload, VllmReload
from benchmarks.lib.update_run import Row, measure, medians, show
from fastdeploy.bench.client import Client
from fastdeploy.testing.tensors import perturbed_copy

SERVED = "base"
FOLDER, DISK, SHARED, UPLOAD, ONE_SET, DELTA = KINDS = (
    "folder", "folder-on-disk", "shared-memory", "upload", "one-set", "delta")  # fmt: skip
Makers = dict[str, Callable[[Client], Source]]


@dataclass(frozen=True)
class Variant:
    """One kind of update. source: a key of the sources of its engine."""

    source: str
    paused: bool
    kv: str = "keep"


def variants(kinds: Sequence[str]) -> list[Variant]:
    """Return the updates of this engine, in the order in which they are measured."""
    found = [
        Variant(kind, paused) for kind in (FOLDER, DISK, SHARED, UPLOAD) if kind in kinds for paused in (True, False)
    ]
    if FOLDER in kinds:
        found.append(Variant(FOLDER, False, kv="recompute"))
    if ONE_SET in kinds:
        found.append(Variant(ONE_SET, True))
    if DELTA in kinds:
        found += [Variant(name, paused) for name in DELTAS for paused in (True, False)]
    return found


DELTAS = {"1": (0.01, "none"), "1z": (0.01, "zstd"), "3": (0.03, "none"), "3z": (0.03, "zstd")}


def makers(kinds: Sequence[str], checkpoints: Sequence[Checkpoint]) -> Makers:
    """Return the makers of this engine's sources."""
    found: Makers = {
        kind: partial(of, checkpoints=checkpoints)
        for kind, of in (
            (FOLDER, Folder),
            (DISK, FolderOnDisk),
            (SHARED, SharedMemory),
            (UPLOAD, Upload),
            (ONE_SET, OneSet),
        )
    }
    if DELTA in kinds:
        for name, (share, compression) in DELTAS.items():
            found[name] = partial(Delta, checkpoints=checkpoints, share=share, compression=compression)
    return found


async def run_repeats(
    args: argparse.Namespace, running: RunningEngines, checkpoints: Sequence[Checkpoint], say: Callable[[str], None]
) -> dict[str, list[list[Row]]]:
    """Return the rows by engine, then by variant, one for each repeat."""
    plans = {"ours": variants(args.only), "vllm": [Variant(FOLDER, True)]}
    sources: dict[str, dict[str, Source]] = {}
    rows: dict[str, list[list[Row]]] = {}
    number = 0

    async def all_variants(name: str, pids: Sequence[int], client: Client) -> None:
        nonlocal number
        if name not in sources:
            made = (
                makers(args.only, checkpoints)
                if name == "ours"
                else {FOLDER: partial(VllmReload, checkpoints=checkpoints)}
            )
            sources[name] = {source: maker(client) for source, maker in made.items()}
            rows[name] = [[] for _ in plans[name]]
        dialect = DIALECTS["native" if name == "ours" else "vllm"](client)
        for variant, found in zip(plans[name], rows[name], strict=True):
            number += 1
            source = sources[name][variant.source]
            row = await measure(dialect, source, variant.paused, variant.kv, number, SERVED, args, pids)
            found.append(row)
            say(f"{name}: {row.source}, {'paused' if row.paused else 'live'}: {row.total:.2f} s")

    for _ in range(args.repeats):
        for contender in list(running.contenders):
            with running.removed_on_failure(contender):
                pids = contender.server.processes()
                await contender.run(partial(all_variants, contender.engine.name, pids))
    return {name: found for name, found in rows.items() if name in {c.engine.name for c in running.contenders}}


def run(engines: Sequence[Engine], args: argparse.Namespace, printer: Printer) -> int:
    running = RunningEngines(printer.say)
    with tempfile.TemporaryDirectory(prefix="weight-update-", dir=args.scratch) as scratch:
        changed = Path(scratch) / "changed"
        printer.say(f"making a changed copy of {args.model_path}")
        perturbed_copy(args.model_path, changed, scale=0.01)
        checkpoints = [Checkpoint(args.model_path.resolve()), Checkpoint(changed)]
        for checkpoint in checkpoints:  # a trainer has its weights in memory
            checkpoint.load(shared=SHARED in args.only)
        try:
            with running.started(engines, READY_S):
                rows = asyncio.run(run_repeats(args, running, checkpoints, printer.say))
        finally:
            for checkpoint in checkpoints:
                checkpoint.close()
    found = {name: [medians(repeats) for repeats in each] for name, each in rows.items()}
    show(printer, found, f"{args.model_path.name}, {args.streams} streams, medians of {args.repeats}")
    each = {name: [[asdict(row) for row in repeats] for repeats in kinds] for name, kinds in rows.items()}
    write_json(args, {"engines": {e.name: e.version for e in engines}, "rows": each})
    return printer.failed(
        [f"{name}: {line}" for name, rows in found.items() for row in rows for line in row.wrong], "WRONG"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder with one model.safetensors")
    add("--engines", type=some_of(["ours", "vllm"]), default=["ours", "vllm"], help="default: both, if installed")
    add("--only", type=some_of(KINDS), default=list(KINDS), help=f"default: {','.join(KINDS)}")
    add("--streams", type=int, default=8)
    add("--standby-weights", choices=("auto", "on", "off"), default="auto", help="of this engine (%(default)s)")
    add("--prompt-tokens", type=int, default=512)
    add("--quiet-s", type=float, default=3.0, help="seconds of undisturbed generation before each update")
    add("--repeats", type=int, default=5)
    add("--scratch", type=Path, help="parent of the folder for the changed copy (the temporary folder)")
    json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    engines = installed(args.engines, args.model_path, SERVED, printer.say)
    standby = ("--standby-weights", args.standby_weights)
    engines = [replace(e, command=(*e.command, *standby)) if e.name == "ours" else e for e in engines]
    return printer.exit_code(lambda: run(engines, args, printer))


if __name__ == "__main__":
    sys.exit(main())
