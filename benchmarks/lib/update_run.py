"""One measured weight update under running streams, and the table of all of them."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.lib.dialect import Dialect
from benchmarks.lib.processes import PeakMemory
from benchmarks.lib.report import Printer
from benchmarks.lib.update import Source, UpdateTimes
from fastdeploy.bench.client import Stream
from fastdeploy.bench.timeline import median_step
from fastdeploy.bench.workload import completion, prompt_ids

BEFORE, AFTER = 8, 8  # tokens of every stream before the quiet time, and under the new weights
MAX_TOKENS = 2000
NUMBERS = ("quiesce", "transfer", "stage", "commit", "recompute", "first_token", "total", "silent", "step", "nbytes",
           "speed_before", "speed_meanwhile", "engine_bytes", "shared_bytes")  # fmt: skip


@dataclass
class Row:
    """One update; times in seconds. quiesce: until the pause was answered. first_token: from the end of the last call
    to the first token of the new weights. recompute: the part of that time beyond one step, if KV was dropped. total:
    all calls. silent: longest time without a token of any stream. step: time between tokens of a stream in the quiet
    time. speed_before, speed_meanwhile: tokens per second of all streams in the quiet time, and during the calls.
    engine_bytes, shared_bytes: see PeakMemory."""

    source: str
    paused: bool
    kv: str
    quiesce: float = 0.0
    transfer: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    recompute: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    silent: float = 0.0
    step: float = 0.0
    nbytes: float = 0.0
    speed_before: float = 0.0
    speed_meanwhile: float = 0.0
    engine_bytes: float = 0.0
    shared_bytes: float = 0.0
    recomputed: int | None = None
    wrong: list[str] = field(default_factory=list)


async def measure(
    dialect: Dialect,
    source: Source,
    paused: bool,
    kv: str,
    number: int,
    model: str,
    args: argparse.Namespace,
    pids: Sequence[int],
) -> Row:
    """Make one update. number: unique in a run. pids: the server's processes. Raises ServerError, WireError, OSError or
    TimeoutError."""
    row = Row(source.name, paused, kv)
    await source.prepare()
    streams = await _start(dialect, number, model, args)
    try:
        quiet = time.perf_counter()
        await asyncio.sleep(args.quiet_s)
        began = time.perf_counter()
        if paused:
            await dialect.pause("keep", clear_cache=False, timeout_s=60)
            row.quiesce = time.perf_counter() - began
        version = f"update-{number}"
        with PeakMemory(pids) as memory:
            times = await source.update(version, kv)
            if paused:
                await dialect.resume()
            ended = time.perf_counter()
        row.engine_bytes, row.shared_bytes = memory.engine, memory.shared
        await asyncio.gather(*(s.wait_tokens(s.log.num_tokens + AFTER) for s in streams))
        fill(row, streams, quiet, began, ended, version if dialect.name == "native" else None)
    finally:
        for stream in streams:
            stream.cancel()
    _note_times(row, times, ended - began)
    return row


def _note_times(row: Row, times: UpdateTimes, total: float) -> None:
    row.transfer, row.stage, row.commit, row.total = times.transfer, times.stage, times.commit, total
    row.nbytes, row.recomputed = times.nbytes, times.report.get("tokens_to_recompute")
    if row.recomputed:
        row.recompute = max(row.first_token - row.step, 0.0)
        row.first_token -= row.recompute


async def _start(dialect: Dialect, number: int, model: str, args: argparse.Namespace) -> list[Stream]:
    streams = []
    for i in range(args.streams):
        prompt = prompt_ids(0, number * args.streams + i, args.prompt_tokens)
        name = f"update-{number}-{i}" if dialect.name == "native" else ""
        body = completion(model, prompt, MAX_TOKENS, name)
        streams.append(await dialect.client.stream("/v1/completions", body, f"s{i}"))
    await asyncio.gather(*(stream.wait_tokens(BEFORE) for stream in streams))
    return streams


def fill(row: Row, streams: Sequence[Stream], quiet: float, began: float, ended: float, version: str | None) -> None:
    """Fill in what the streams saw. quiet, began, ended: start of the quiet time, start and end of the calls. version:
    label of the new weights, or None for a server that does not label tokens: then the first token after ``ended``
    counts as new."""
    logs = [stream.log for stream in streams]
    arrivals = sorted(event.at for log in logs for event in log.tokens)
    around = [at for at in arrivals if at >= began - 1.0]
    row.silent = max((b - a for a, b in zip(around, around[1:], strict=False)), default=0.0)
    row.step = median_step(logs, quiet, began)
    row.speed_before, row.speed_meanwhile = _speed(arrivals, quiet, began), _speed(arrivals, began, ended)
    firsts = []
    for log in logs:
        if log.error or log.finals:
            row.wrong.append(f"{log.request_id} ended: {log.error or log.reason}")
        is_new = [event.at > ended if version is None else event.last_version == version for event in log.tokens]
        if not any(is_new):
            row.wrong.append(f"{log.request_id} has no token of {version}")
            continue
        first = is_new.index(True)
        firsts.append(log.tokens[first].at)
        if not all(is_new[first:]):
            row.wrong.append(f"{log.request_id}: an old label after {version}")
    row.first_token = max(min(firsts, default=ended) - ended, 0.0)


def _speed(arrivals: Sequence[float], start: float, end: float) -> float:
    """Return the tokens per second in about [start, end]. Both ends are moved to the last arrival before them, since
    the tokens of one step arrive together."""
    first = max((at for at in arrivals if at <= start), default=start)
    last = max((at for at in arrivals if at <= end), default=end)
    return sum(first < at <= last for at in arrivals) / (end - start if last <= first else last - first)


def medians(rows: Sequence[Row]) -> Row:
    """Return the medians of the repeats of one variant."""
    first = rows[0]
    result = replace(first, wrong=[line for row in rows for line in row.wrong])
    for name in NUMBERS:
        setattr(result, name, median(getattr(row, name) for row in rows))
    if first.recomputed is not None:
        result.recomputed = int(median(row.recomputed or 0 for row in rows))
    return result


def show(printer: Printer, rows: Mapping[str, Sequence[Row]], title: str) -> None:
    """Print the table. rows: by engine. The last column is the time of vLLM's reload over that of the row."""
    header = ("engine", "source", "", "kv", "MB", "quiesce ms", "transfer ms", "stage ms", "commit ms",
              "first token ms", "total ms", "no token for ms", "step ms", "tok/s before", "tok/s meanwhile", "kept",
              "engine MB", "/dev/shm MB", "vLLM's reload / this")  # fmt: skip
    reload = rows["vllm"][0].total if "vllm" in rows else 0.0
    table = []
    for engine, each in rows.items():
        for row in each:
            times = (row.quiesce, row.transfer, row.stage, row.commit, row.first_token + row.recompute, row.total,
                     row.silent, row.step)  # fmt: skip
            kept = "-" if row.paused else f"{row.speed_meanwhile / row.speed_before:.0%}" if row.speed_before else "?"
            table.append([
                engine,
                row.source,
                "paused" if row.paused else "live",
                row.kv,
                f"{row.nbytes / 1e6:.1f}",
                *(f"{1000 * value:.1f}" for value in times),
                f"{row.speed_before:.0f}",
                "-" if row.paused else f"{row.speed_meanwhile:.0f}",
                kept,
                f"{row.engine_bytes / 1e6:.0f}",
                f"{row.shared_bytes / 1e6:.0f}",
                f"{reload / row.total:.2f}" if reload and row.total else "-",
            ])  # fmt: skip
    printer.table(f"weight updates: {title}", header, table)
