#!/usr/bin/env python
"""Measure throughput and latency of any OpenAI completions server, closed loop or open loop.

    python benchmarks/serving.py --url http://127.0.0.1:8180 --concurrency 8 --input-len 32 --output-len 64
    python benchmarks/serving.py --url http://127.0.0.1:8180 --rate 2 --num-requests 100

Closed loop: each of N clients sends its next request when its last one ended. Open loop: Poisson arrivals, which do not
wait for answers. Prompts are seeded random token ids; sampling is greedy with ignore_eos. Exits 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.dialect import Dialect
from benchmarks.lib.report import Printer, json_flag, write_json
from fastdeploy.bench.client import Client
from fastdeploy.bench.stats import PERCENTS, ServingStats, summarize
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import closed_loop, completion, prompt_ids


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8180")
    add("--model", help="default: the first one that the server lists")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop with N clients")
    load.add_argument("--rate", type=float, metavar="R", help="open loop, R requests per second")
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=64)
    add("--num-requests", type=int, help="default: 4 per client, or 32")
    json_flag(parser)
    args = parser.parse_args(argv)
    if args.rate is not None and args.rate <= 0 or args.concurrency < 1:
        parser.error("--rate and --concurrency must be above zero")
    args.clients = 1 if args.rate else args.concurrency
    args.num_requests = args.num_requests or (32 if args.rate else 4 * args.clients)
    return args


async def open_loop(send: Callable[[int], Coroutine[Any, Any, StreamLog]], count: int, rate: float) -> list[StreamLog]:
    """Send ``count`` requests with Poisson arrivals. A slow answer does not delay later requests."""
    rng, loop, at = random.Random(0), asyncio.get_running_loop(), 0.0
    start, tasks = loop.time(), []
    for index in range(count):
        await asyncio.sleep(start + at - loop.time())
        tasks.append(asyncio.create_task(send(index)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def measure(args: argparse.Namespace) -> tuple[str, ServingStats]:
    client = Client(args.url)
    model, _ = await Dialect(client).model(args.model)

    async def one(index: int) -> StreamLog:
        body = completion(model, prompt_ids(0, index, args.input_len), args.output_len)
        return await (await client.stream("/v1/completions", body)).wait_closed()

    await closed_loop(one, args.clients, args.clients, first=10**6)  # to warm up
    if args.rate:
        return model, summarize(await open_loop(one, args.num_requests, args.rate))
    return model, summarize(await closed_loop(one, args.num_requests, args.clients))


def show(args: argparse.Namespace, stats: ServingStats, printer: Printer) -> None:
    load = f"open loop, {args.rate} req/s" if args.rate else f"closed loop, {args.concurrency} streams"
    rows = [
        ("requests completed", str(stats.completed)),
        ("requests failed", str(stats.failed)),
        ("duration s", f"{stats.duration_s:.2f}"),
        ("output tokens", str(stats.output_tokens)),
        ("output tokens/s", f"{stats.tokens_per_s:.1f}"),
        ("requests/s", f"{stats.requests_per_s:.2f}"),
    ]
    printer.table(f"{load}, {args.input_len} in, {args.output_len} out", ("figure", "value"), rows)
    names = ("first token (TTFT)", "per token (TPOT)", "between chunks (ITL)", "whole request")
    spreads = zip(names, (stats.ttft, stats.tpot, stats.itl, stats.e2e), strict=True)
    latencies = [[name, *(f"{1000 * x:.1f}" for x in (s.mean, *s.at.values()))] for name, s in spreads if s.count]
    printer.table("latency, ms", ("of", "mean", *(f"p{p}" for p in PERCENTS)), latencies)


def run(args: argparse.Namespace, printer: Printer) -> int:
    model, stats = asyncio.run(measure(args))
    show(args, stats, printer)
    write_json(args, {"model": model, "stats": asdict(stats)})
    return printer.failed(stats.errors) or int(not stats.completed)


def main(argv: list[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: run(args, printer))


if __name__ == "__main__":
    sys.exit(main())
