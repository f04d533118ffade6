#!/usr/bin/env python
"""Measure what a weight update costs running generations: time per phase and source, with and without a pause.

    python benchmarks/weight_update.py --url http://127.0.0.1:8180 --folder ~/.cache/fastdeploy-peers/q05
    python benchmarks/weight_update.py --url http://127.0.0.1:8001 --folder ... --dialect vllm

``--streams`` generations run. Updates alternate between a slightly changed copy of --folder (made once, in --scratch)
and the folder itself. Exits 1 if a stream ended or a token has the wrong version, 2 if the server cannot be driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.client import Client, Stream
from benchmarks.lib.dialect import DIALECTS, FAILURES, Dialect
from benchmarks.lib.perturb import perturbed_copy
from benchmarks.lib.report import Printer, machine, write_json
from benchmarks.lib.timeline import median_step
from benchmarks.lib.update import SOURCES, VllmReload
from benchmarks.lib.workload import completion, prompt_ids

BEFORE, AFTER = 16, 8  # tokens of every stream before the update, and under the new weights
# Titles of the table, and the times of Row that they show.
SHOWN = {"quiesce": "quiesce", "transfer": "transfer", "check+pack": "stage", "commit": "commit", "recompute":
         "recompute", "first token": "first_token", "total": "total", "no token for": "silent"}  # fmt: skip


@dataclass
class Row:
    """One update; times in seconds. quiesce: until the pause was answered. first_token: from the end of the last call
    to the first token of the new weights. recompute: the part of that time beyond one step, if KV was dropped. total:
    all calls. silent: longest time without a token of any stream. step: time between tokens of a stream before."""

    source: str
    paused: bool
    kv: str
    in_place: bool
    quiesce: float = 0.0
    transfer: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    recompute: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    silent: float = 0.0
    step: float = 0.0
    tokens_meanwhile: int = 0
    recomputed: int | None = None
    wrong: list[str] = field(default_factory=list)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8180")
    add("--dialect", choices=DIALECTS, default="native")
    add("--folder", type=Path, required=True, help="the checkpoint that is served, one model.safetensors")
    add("--scratch", type=Path, help="where the changed copy goes (a temporary folder)")
    add("--model", help="default: the first one that the server lists")
    add("--streams", type=int, default=8)
    add("--prompt-tokens", type=int, default=512)
    add("--repeats", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="write everything seen; - for stdout")
    return parser.parse_args(argv)


def update_variants(dialect: str) -> list[tuple[str, bool, str, bool]]:
    """Return (source, paused, kv, in_place) of every update that is measured."""
    if dialect == "vllm":
        return [("folder", True, "keep", True)]
    live = [(source, paused, "keep", False) for source in SOURCES for paused in (False, True)]
    return [*live, ("folder", False, "recompute", False), ("folder", True, "keep", True)]


class UpdateBenchmark:
    """Updates one server again and again, from ``folders`` in turn."""

    def __init__(self, dialect: Dialect, model: str, args: argparse.Namespace, folders: list[Path]):
        self._dialect = dialect
        self._model = model
        self._args = args
        self._folders = folders
        self._updates = 0

    async def measure(self, source: str, paused: bool, kv: str, in_place: bool) -> Row:
        row = Row(source, paused, kv, in_place)
        self._updates += 1
        folder = self._folders[self._updates % len(self._folders)]
        native = self._dialect.name == "native"
        updater = (SOURCES[source] if native else VllmReload)(self._dialect.client, folder)
        streams = await self._start()
        try:
            began = time.perf_counter()
            if paused:
                await self._dialect.pause("keep", clear_cache=False, timeout_s=60)
                row.quiesce = time.perf_counter() - began
            version = f"update-{self._updates}"
            times = await updater.update(version, kv, in_place)
            if paused:
                await self._dialect.resume()
            ended = time.perf_counter()
            await asyncio.gather(*(s.wait_tokens(s.log.num_tokens + AFTER) for s in streams))
            self._fill(row, streams, began, ended, version if native else None)
        finally:
            for stream in streams:
                stream.cancel()
        row.transfer, row.stage, row.commit, row.total = times.transfer, times.stage, times.commit, ended - began
        row.recomputed = times.report.get("tokens_to_recompute")
        if row.recomputed:
            row.recompute = max(row.first_token - row.step, 0.0)
            row.first_token -= row.recompute
        return row

    async def _start(self) -> list[Stream]:
        args, streams = self._args, []
        for i in range(args.streams):
            prompt = prompt_ids(args.seed, self._updates * args.streams + i, args.prompt_tokens)
            body = completion(self._model, prompt, 2000, f"update-{args.seed}-{self._updates}-{i}")
            if self._dialect.name == "vllm":
                body.pop("request_id")
            streams.append(await self._dialect.client.stream("/v1/completions", body, f"s{i}"))
        await asyncio.gather(*(stream.wait_tokens(BEFORE) for stream in streams))
        return streams

    def _fill(self, row: Row, streams: list[Stream], began: float, ended: float, version: str | None) -> None:
        logs = [stream.log for stream in streams]
        arrivals = sorted(event.at for log in logs for event in log.tokens)
        around = [at for at in arrivals if at >= began - 1.0]
        row.silent = max((b - a for a, b in zip(around, around[1:], strict=False)), default=0.0)
        row.step = median_step(logs, 0.0, began)
        row.tokens_meanwhile = sum(began < at < ended for at in arrivals)
        firsts = []
        for log in logs:
            if log.error or log.finals:
                row.wrong.append(f"{log.request_id} ended: {log.error or log.reason}")
            # vLLM does not label tokens: the first one after the update is taken for new.
            is_new = [event.at > ended if version is None else event.last_version == version for event in log.tokens]
            if not any(is_new):
                row.wrong.append(f"{log.request_id} has no token of {version}")
                continue
            first = is_new.index(True)
            firsts.append(log.tokens[first].at)
            if not all(is_new[first:]):
                row.wrong.append(f"{log.request_id}: an old label after {version}")
        row.first_token = max(min(firsts, default=ended) - ended, 0.0)


def medians(rows: list[Row]) -> Row:
    """Return the medians of the repeats of one variant."""
    first = rows[0]
    result = replace(first, wrong=[line for row in rows for line in row.wrong])
    for name in (*SHOWN.values(), "step"):
        setattr(result, name, median(getattr(row, name) for row in rows))
    result.tokens_meanwhile = int(median(row.tokens_meanwhile for row in rows))
    if first.recomputed is not None:
        result.recomputed = int(median(row.recomputed or 0 for row in rows))
    return result


def show(printer: Printer, rows: list[Row]) -> None:
    header = ("source", "paused", "kv", *(f"{title} ms" for title in SHOWN), "tokens meanwhile", "recomputed")
    table = []
    for row in rows:
        times = [f"{1000 * getattr(row, name):.1f}" for name in SHOWN.values()]
        kv = row.kv + (", in place" if row.in_place else "")
        more = [str(row.tokens_meanwhile), "-" if row.recomputed is None else str(row.recomputed)]
        table.append([row.source, "yes" if row.paused else "no", kv, *times, *more])
    printer.table("weight updates (medians)", header, table)


async def run(args: argparse.Namespace, printer: Printer) -> int:
    dialect = DIALECTS[args.dialect](Client(args.url))
    model, _ = await dialect.model(args.model)
    with tempfile.TemporaryDirectory() as temporary:
        changed = (args.scratch or Path(temporary)) / "changed"
        if not changed.exists():
            printer.say(f"making a changed copy of {args.folder}")
            perturbed_copy(args.folder, changed, scale=0.01, seed=args.seed)
        bench = UpdateBenchmark(dialect, model, args, [args.folder.resolve(), changed.resolve()])
        rows = []
        for variant in update_variants(args.dialect):
            each = [await bench.measure(*variant) for _ in range(args.repeats)]
            rows.append(medians(each))
            printer.say(f"{variant}: {rows[-1].total:.2f} s, no token for {rows[-1].silent:.3f} s")
    show(printer, rows)
    if args.json:
        write_json(args.json, {"url": args.url, "machine": machine(), "rows": [asdict(row) for row in rows]})
    wrong = [line for row in rows for line in row.wrong]
    for line in wrong:
        printer.say(f"WRONG: {line}")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    try:
        return asyncio.run(run(args, printer))
    except (*FAILURES, ValueError) as error:
        printer.say(f"cannot drive {args.url}: {type(error).__name__}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
