#!/usr/bin/env python
"""Measure what prompts cost the streams that run when they arrive, and what sparing the streams costs.

    python benchmarks/interference.py --model-path ~/.cache/fastdeploy-peers/q05 --json interference.json

Starts this engine twice: as it is, and with ``--max-step-ms`` (--limit-ms): one limit for every step with a prompt,
however many run. Each load is sent to both in turn: greedy streams, and, when each has some tokens, prompts that arrive
at once. The columns:

    step            time between tokens of the streams before the prompts come
    beside          mean time between their tokens from then until the last prompt has its first token; over ``step``
    p95             of the gaps in that time, over ``step``
    first token     mean time from a prompt's arrival to its first token
    tok/s           output tokens of all requests, from the arrival of the prompts until everything has ended

Medians over the repeats. Exits 1 if a request failed, 2 if a server cannot be started or driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.client import Client
from benchmarks.lib.engines import Limits, ours
from benchmarks.lib.processes import started
from benchmarks.lib.report import Printer, json_flag, percentile, write_json
from benchmarks.lib.timeline import StreamLog, gaps, median_step
from benchmarks.lib.workload import completion, prompt_ids

SERVED = "served"
READY_S = 300.0
STREAM_INPUT = 32  # tokens
BEFORE = 24  # tokens of each stream before the prompts come; the last half gives the step
PROMPT_OUTPUT = 32  # tokens
HEADER = ("streams", "prompts", "server", "step ms", "beside ms", "ratio", "p95", "first token s", "tok/s")


@dataclass(frozen=True)
class Load:
    """streams: that run. prompts: that arrive together, of ``length`` tokens each."""

    streams: int
    prompts: int
    length: int


@dataclass(frozen=True)
class Round:
    """The figures of one load, see the columns above. All times in seconds."""

    step_s: float
    beside_s: float
    p95_s: float
    first_token_s: float
    tokens_per_s: float
    errors: tuple[str, ...] = ()

    def over_step(self, seconds: float) -> float:
        """Return a time in steps; 0 if all tokens before the prompts came at once."""
        return seconds / self.step_s if self.step_s else 0.0


def arrival(log: StreamLog, count: int) -> float:
    """Return the time at which a stream had ``count`` tokens. One event may have several."""
    totals = accumulate(len(event.token_ids) for event in log.tokens)
    return next(event.at for event, total in zip(log.tokens, totals, strict=True) if total >= count)


def figures(streams: Sequence[StreamLog], prompts: Sequence[StreamLog], came: float, output_len: int) -> Round:
    """Return the figures of logs of complete streams. came: when the prompts were sent."""
    lengths = [output_len] * len(streams) + [PROMPT_OUTPUT] * len(prompts)
    logs = [*streams, *prompts]
    errors = [f"{log.request_id}: {why}" for log, n in zip(logs, lengths, strict=True) if (why := log.fault(n))]
    if errors:
        return Round(0.0, 0.0, 0.0, 0.0, 0.0, tuple(errors))
    begun = max(log.tokens[0].at for log in prompts)
    settled = max(arrival(log, BEFORE // 2) for log in streams)
    ended = max(log.tokens[-1].at for log in logs)
    beside = [
        gap for log in streams for event, gap in zip(log.tokens[1:], gaps(log), strict=True) if came < event.at <= begun
    ]
    return Round(
        step_s=median_step(streams, settled, came),
        beside_s=mean(beside or [0.0]),
        p95_s=percentile(beside, 95),
        first_token_s=mean(log.tokens[0].at - log.sent_at for log in prompts),
        tokens_per_s=sum(log.tokens_between(came, ended + 1.0) for log in logs) / (ended - came),
    )


async def measure(client: Client, load: Load, seed: str, output_len: int) -> Round:
    async def send(count: int, name: str, length: int, tokens: int) -> list:
        bodies = [completion(SERVED, prompt_ids(f"{seed}/{name}", i, length), tokens) for i in range(count)]
        return [await client.stream("/v1/completions", body, f"{name}-{i}") for i, body in enumerate(bodies)]

    streams = await send(load.streams, "stream", STREAM_INPUT, output_len)
    await asyncio.gather(*(stream.wait_tokens(BEFORE) for stream in streams))
    prompts = await send(load.prompts, "prompt", load.length, PROMPT_OUTPUT)
    logs = await asyncio.gather(*(stream.wait_closed() for stream in [*streams, *prompts]))
    came = min(log.sent_at for log in logs[load.streams :])
    return figures(logs[: load.streams], logs[load.streams :], came, output_len)


async def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[tuple[Load, str], list[Round]]:
    """Return the rounds of each load on each server."""
    engine = ours(args.model_path, SERVED, Limits(sequences=max(args.streams) + args.prompts))
    servers = {"default": (), f"limit {args.limit_ms:g} ms": ("--max-step-ms", str(args.limit_ms))}
    loads = [Load(streams, args.prompts, length) for streams, length in product(args.streams, args.lengths)]
    rounds: dict[tuple[Load, str], list[Round]] = {(load, name): [] for load in loads for name in servers}
    with ExitStack() as stack:
        clients = {}
        for name, flags in servers.items():
            server = stack.enter_context(started((*engine.command, *flags)))
            say(f"{engine.version}, {name}: ready after {await server.wait_ready(READY_S, engine.ready):.1f} s")
            clients[name] = Client(server.url)
        for repeat, load, name in product(range(args.repeats), loads, servers):
            found = await measure(clients[name], load, f"{repeat}/{load}", args.output_len)
            say(f"{load}, {name}: {found}")
            rounds[load, name].append(found)
    return rounds


def row(load: Load, name: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    """Return a row of the table: medians over the rounds without errors."""
    names = (str(load.streams), f"{load.prompts} x {load.length}", name)
    good = [found for found in rounds if not found.errors]
    if not good:
        return (*names, *"-" * (len(HEADER) - len(names)))
    return (
        *names,
        f"{1000 * median(found.step_s for found in good):.0f}",
        f"{1000 * median(found.beside_s for found in good):.0f}",
        f"{median(found.over_step(found.beside_s) for found in good):.2f}",
        f"{median(found.over_step(found.p95_s) for found in good):.2f}",
        f"{median(found.first_token_s for found in good):.2f}",
        f"{median(found.tokens_per_s for found in good):.0f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, numbers = parser.add_argument, lambda text: [int(number) for number in text.split(",")]
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    add("--streams", type=numbers, default=[1, 8, 32], help="that run, a list (1,8,32)")
    add("--lengths", type=numbers, default=[32, 512, 2048], help="of the prompts that arrive, a list (32,512,2048)")
    add("--prompts", type=int, default=8, help="that arrive at once (%(default)s)")
    add("--output-len", type=int, default=384, help="of the streams (%(default)s)")
    add("--limit-ms", type=float, default=250.0, help="--max-step-ms of the second server (%(default)g)")
    add("--repeats", type=int, default=3)
    json_flag(parser)
    args = parser.parse_args(argv)
    if args.output_len <= BEFORE:
        parser.error(f"--output-len: more than {BEFORE}, after which the prompts come")
    return args


def report(args: argparse.Namespace, printer: Printer) -> int:
    found = asyncio.run(run(args, printer.say))
    rows = [row(load, name, rounds) for (load, name), rounds in found.items()]
    printer.table(f"prompts beside running streams, medians of {args.repeats}", HEADER, rows)
    loads = [{**asdict(load), "server": name, "rounds": list(map(asdict, of))} for (load, name), of in found.items()]
    write_json(args, {"loads": loads})
    return printer.failed([error for rounds in found.values() for one in rounds for error in one.errors])


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: report(args, printer))


if __name__ == "__main__":
    sys.exit(main())
