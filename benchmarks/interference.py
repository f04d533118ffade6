#!/usr/bin/env python
"""Measure what prompts cost the streams that run when they arrive, and what sparing the streams costs.

    python benchmarks/interference.py --model-path ~/.cache/fastdeploy-peers/q05 --json interference.json
    python benchmarks/interference.py --model-path ~/.cache/fastdeploy-peers/q05 --isas avx512_bf16,avx512,avx2 \\
        --markdown interference.md --plot docs/interference.png

For each instruction set, starts this engine twice: as it is, and with ``--max-step-ms`` (--limit-ms): one limit for
every step with a prompt, however many run. Each load is sent to both in turn: greedy streams, and, when each has some
tokens, prompts that arrive at once. Without speculation, so that each event of a stream is one step. The columns:

    step            time between tokens of the streams before the prompts come
    beside          mean time between their tokens from then until the last prompt has its first token; over ``step``
    p50, p95        of the gaps in that time, over ``step``
    first token     mean time from a prompt's arrival to its first token
    tok/s           output tokens of all requests, from the arrival of the prompts until everything has ended

Medians over the repeats. The plot needs matplotlib: ``pip install -e ".[plots]"``. Exits 1 if a request failed, 2 if a
server cannot be started or driven.
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

from fastdeploy.testing import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.engines import Limits, ours
from benchmarks.lib.report import Printer, json_flag, markdown, numbers, write_json
from fastdeploy.bench.client import Client
from fastdeploy.bench.stats import percentile
from fastdeploy.bench.timeline import StreamLog, gaps, median_step
from fastdeploy.bench.workload import completion, prompt_ids

SERVED = "served"
READY_S = 300.0
STREAM_INPUT = 32  # tokens
BEFORE = 24  # tokens of each stream before the prompts come; the last half gives the step
PROMPT_OUTPUT = 32  # tokens
HEADER = (
    "isa",
    "streams",
    "prompts",
    "server",
    "step ms",
    "beside ms",
    "ratio",
    "p50",
    "p95",
    "first token s",
    "tok/s",
)
PAGE_HEADER = (
    "instruction set",
    "streams",
    "prompts",
    "step",
    "beside / step: mean, p50, p95",
    "with the limit",
    "first token",
    "with the limit",
    "tok/s over those with the limit",
)
DEFAULT = "default"
TICKS = (1, 1.5, 2, 4, 8, 16)  # of the plot, in steps


@dataclass(frozen=True)
class Load:
    """isa: instruction set of the server, "" = the best one that the machine has. streams: that run. prompts: that
    arrive together, of ``length`` tokens each."""

    isa: str
    streams: int
    prompts: int
    length: int


@dataclass(frozen=True)
class Round:
    """The figures of one load, see the columns above. All times in seconds."""

    step_s: float
    beside_s: float
    p50_s: float
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
        return Round(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, tuple(errors))
    begun = max(log.tokens[0].at for log in prompts)
    settled = max(arrival(log, BEFORE // 2) for log in streams)
    ended = max(log.tokens[-1].at for log in logs)
    beside = [
        gap for log in streams for event, gap in zip(log.tokens[1:], gaps(log), strict=True) if came < event.at <= begun
    ]
    return Round(
        step_s=median_step(streams, settled, came),
        beside_s=mean(beside or [0.0]),
        p50_s=percentile(beside, 50),
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


Results = dict[tuple[Load, str], list[Round]]


async def run(args: argparse.Namespace, say: Callable[[str], None]) -> Results:
    """Return the rounds of each load on each server."""
    limits = Limits(sequences=max(args.streams) + args.prompts)
    engine = ours(args.model_path, SERVED, limits)
    servers = {DEFAULT: (), f"limit {args.limit_ms:g} ms": ("--max-step-ms", str(args.limit_ms))}
    rounds: Results = {}
    for isa in args.isas:
        loads = [Load(isa, streams, args.prompts, length) for streams, length in product(args.streams, args.lengths)]
        rounds |= {(load, name): [] for load in loads for name in servers}
        environment = {"FASTDEPLOY_CPU_ISA": isa} if isa else {}
        with ExitStack() as stack:
            clients = {}
            for name, flags in servers.items():
                command = (*engine.command, "--no-enable-speculative-decoding", *flags)
                server = stack.enter_context(ServerProcess(command, environment))
                say(f"{engine.version}, {name}: ready after {server.wait_ready(READY_S, engine.ready):.1f} s")
                clients[name] = Client(server.url)
            for name, client in clients.items():
                await measure(client, Load(isa, 2, 1, STREAM_INPUT), f"warm-up/{name}", args.output_len)
            for repeat, load, name in product(range(args.repeats), loads, servers):
                found = await measure(clients[name], load, f"{repeat}/{load}", args.output_len)
                say(f"{load}, {name}: {found}")
                rounds[load, name].append(found)
    return rounds


def ratio(rounds: Sequence[Round], seconds: str) -> float:
    """Return the median over the rounds of a field of Round in steps."""
    return median(found.over_step(getattr(found, seconds)) for found in rounds)


def row(load: Load, name: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    """Return a row of the table: medians over the rounds without errors."""
    names = (load.isa or "best", str(load.streams), f"{load.prompts} x {load.length}", name)
    good = [found for found in rounds if not found.errors]
    if not good:
        return (*names, *"-" * (len(HEADER) - len(names)))
    return (
        *names,
        f"{1000 * median(found.step_s for found in good):.0f}",
        f"{1000 * median(found.beside_s for found in good):.0f}",
        *(f"{ratio(good, seconds):.2f}" for seconds in ("beside_s", "p50_s", "p95_s")),
        f"{median(found.first_token_s for found in good):.2f}",
        f"{median(found.tokens_per_s for found in good):.0f}",
    )


def compared(found: Results) -> dict[Load, tuple[list[Round], list[Round]]]:
    """Return the rounds of each load on the default server and on the one with the limit. Rounds in which a request
    failed on either are left out, and loads without any other."""
    pairs = {}
    for load in {load: None for load, _ in found}:
        default, limited = (rounds for (of, _), rounds in found.items() if of == load)
        good = [pair for pair in zip(default, limited, strict=True) if not pair[0].errors and not pair[1].errors]
        if good:
            pairs[load] = ([pair[0] for pair in good], [pair[1] for pair in good])
    return pairs


def throughput(default: Sequence[Round], limited: Sequence[Round]) -> float:
    """Return the median of the ratios of the tokens per second."""
    return median(a.tokens_per_s / b.tokens_per_s for a, b in zip(default, limited, strict=True))


def page(found: Results) -> str:
    """Return the table of docs/benchmarks.md."""
    rows = []
    for load, (default, limited) in compared(found).items():
        names = (load.isa or "best", str(load.streams), f"{load.prompts} x {load.length}")
        spans = [ratio(default, seconds) for seconds in ("beside_s", "p50_s", "p95_s")]
        with_limit = ", ".join(f"{ratio(limited, seconds):.1f}" for seconds in ("beside_s", "p50_s", "p95_s"))
        first = [f"{median(each.first_token_s for each in rounds):.2f} s" for rounds in (default, limited)]
        step = f"{1000 * median(each.step_s for each in default):.0f} ms"
        gaps_of = ", ".join(f"{span:.2f}" for span in spans)
        rows.append((*names, step, gaps_of, with_limit, *first, f"{throughput(default, limited):.2f}"))
    return markdown(PAGE_HEADER, rows)


def plot(found: Results, file: Path) -> None:
    """Draw both curves over the number of streams, a line for each length of the prompts and a row of panels for each
    instruction set: time between tokens in steps (dotted: with the limit), and throughput over that with the limit."""
    from matplotlib.figure import Figure  # needed for this only

    pairs = compared(found)
    isas = list({load.isa: None for load in pairs})
    figure = Figure(figsize=(10, 3.2 * len(isas)), layout="constrained")
    for isa, (gap, speed) in zip(isas, figure.subplots(len(isas), 2, squeeze=False), strict=True):
        for colour, length in enumerate({load.length: None for load in pairs if load.isa == isa}):
            of_line = {load.streams: both for load, both in pairs.items() if (load.isa, load.length) == (isa, length)}
            style = {"color": f"C{colour}", "marker": "."}
            for side, line in ((0, "-"), (1, ":")):
                values = [ratio(both[side], "beside_s") for both in of_line.values()]
                gap.plot(list(of_line), values, line, label=f"prompts of {length}" if not side else None, **style)
            speed.plot(list(of_line), [throughput(*both) for both in of_line.values()], **style)
        gap.axhline(1.5, color="grey", linewidth=0.8)
        gap.set(xlabel="streams", ylabel="time between tokens, in steps", yscale="log", title=isa or "best")
        gap.set_yticks(TICKS, map(str, TICKS))
        gap.minorticks_off()
        speed.axhline(0.95, color="grey", linewidth=0.8)
        speed.set(xlabel="streams", ylabel="tok/s over those with the limit", ylim=(0, None))
        gap.legend()
    figure.savefig(file, dpi=110, metadata={"Software": ""})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder")
    add("--streams", type=numbers, default=[1, 8, 32], help="that run, a list (1,8,32)")
    add("--lengths", type=numbers, default=[128, 512], help="of the prompts that arrive, a list (128,512)")
    add("--prompts", type=int, default=4, help="that arrive at once (%(default)s)")
    add("--output-len", type=int, default=256, help="of the streams (%(default)s)")
    add("--isas", type=lambda text: text.split(","), default=[""], help="instruction sets, a list (the machine's best)")
    add("--limit-ms", type=float, default=250.0, help="--max-step-ms of the second server (%(default)g)")
    add("--repeats", type=int, default=3)
    add("--markdown", type=Path, metavar="FILE", help="write the table of docs/benchmarks.md")
    add("--plot", type=Path, metavar="FILE", help="draw both curves, needs matplotlib")
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
    if args.markdown:
        args.markdown.write_text(page(found))
    if args.plot:
        plot(found, args.plot)
    return printer.failed([error for rounds in found.values() for one in rounds for error in one.errors])


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: report(args, printer))


if __name__ == "__main__":
    sys.exit(main())
