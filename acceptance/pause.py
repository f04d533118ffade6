#!/usr/bin/env python
"""Check and measure pause and resume as a client sees them over HTTP; print the acceptance table.

    python acceptance/pause.py --url http://127.0.0.1:8180 --dialect native --waiting 5000
    python acceptance/pause.py --url http://127.0.0.1:8180 --peer vllm=http://127.0.0.1:8001 --running 8 --repeats 3

--running is the server's max_num_seqs, which vLLM has no route for. Exits 1 if a promise fails, 2 if the server cannot
be driven.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from acceptance.lib.pause_report import measure, show_checks, show_outcome, show_peer
from acceptance.lib.scenarios import Acceptance, Options, Outcome, allow_files
from acceptance.lib.verdicts import Check
from benchmarks.lib.dialect import DIALECTS, Dialect
from benchmarks.lib.report import Printer, json_flag, write_json
from fastdeploy.bench.client import Client, ServerError

WAITING = 12  # streams that wait while the others run, without --streams


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8180")
    add("--dialect", choices=DIALECTS, default="native")
    peer = "a second server, measured in turn with the first, e.g. vllm=http://..."
    add("--peer", type=_peer, metavar="DIALECT=URL", help=peer)
    add("--repeats", type=int, default=1, help="of everything; medians are compared with the peer's")
    add("--model", help="default: the first one that the server lists")
    add("--streams", type=int, help="of each scenario (default: 12 more than --running)")
    add("--running", type=int, help="max_num_seqs of the server (default: what it says of itself)")
    add("--prompt-tokens", type=int, default=512)
    add("--max-tokens", type=int, default=3000, help="clamped to what the model's length leaves")
    add("--before", type=int, default=50, help="tokens each running stream has when the pause comes")
    add("--wait-tokens", type=int, default=64, help="max_tokens in mode wait")
    add("--freeze", type=float, default=2.0, metavar="S", dest="freeze_s", help="how long keep stays paused")
    add("--waiting", type=int, default=0, metavar="N", help="also abort and keep with N requests waiting, e.g. 5000")
    add("--max-pause-steps", type=float, metavar="N", help="fail if an abort or keep takes more steps")
    json_flag(parser)
    args = parser.parse_args(argv)
    if args.running is not None and args.streams is not None and not 0 < args.running < args.streams:
        parser.error("--streams must be above --running, else nothing waits")
    return args


def _peer(text: str) -> tuple[str, str]:
    dialect, _, url = text.partition("=")
    if dialect not in DIALECTS or not url:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DIALECTS)}, =, and a URL; got {text!r}")
    return dialect, url


async def make_options(dialect: Dialect, args: argparse.Namespace) -> Options:
    model, length = await dialect.model(args.model)
    running = args.running or await dialect.capacity()
    if running is None:
        raise ServerError("the server does not say how many sequences run at once: give its max_num_seqs as --running")
    streams = args.streams or running + WAITING
    if streams <= running:
        raise ServerError(f"--streams {streams}: {running} run at once, so that nothing would wait")
    room = args.max_tokens if length is None else min(args.max_tokens, length - args.prompt_tokens)
    if room <= args.before + Options.after or args.wait_tokens > room:
        raise ServerError(f"{model} has a length of {length}: no room for {args.prompt_tokens} tokens and the answers")
    chosen = {field.name: getattr(args, field.name) for field in fields(Options) if hasattr(args, field.name)}
    return Options(**chosen | {"model": model, "streams": streams, "running": running, "max_tokens": room})


def check_speed(outcome: Outcome, most: float | None) -> list[Check]:
    if most is None:
        return []
    return [
        run.check(f"paused within {most:g} steps", f"{run.pause_steps:.2f} steps", run.pause_steps <= most)
        for run in outcome.runs
        if not run.scenario.startswith("wait")
    ]


async def measure_server(dialect: Dialect, url: str, args: argparse.Namespace, printer: Printer) -> Outcome:
    options = await make_options(dialect, args)
    allow_files(2 * max(options.streams, options.running + options.waiting))
    printer.say(f"{url} ({dialect.name}), model {options.model}, max_tokens {options.max_tokens}")
    return await Acceptance(dialect, options, printer.say, lambda checks: show_checks(printer, checks)).run()


def report(dialect: str, url: str, outcomes: list[Outcome], printer: Printer) -> dict:
    """Print the results of one server over all repeats; return them for the JSON."""
    for outcome in outcomes:
        show_outcome(printer, outcome)
    checks = [check for outcome in outcomes for check in outcome.checks]
    held, apart, failed = (sum(check.ok is ok for check in checks) for ok in (True, None, False))
    printer.say(f"{url}: {held} promises held, {failed} failed, {apart} do not apply")
    return {
        "url": url,
        "dialect": dialect,
        "runs": [measure(run) for outcome in outcomes for run in outcome.runs],
        "checks": [asdict(check) for check in checks],
        "failed": failed,
    }


async def measure_all(args: argparse.Namespace, printer: Printer) -> int:
    """Measure all servers in turn, ``repeats`` times. Return the exit code, which depends on the first server only."""
    servers = [(args.dialect, args.url), *filter(None, [args.peer])]
    outcomes: list[list[Outcome]] = [[] for _ in servers]
    for _ in range(args.repeats):
        for (name, url), mine in zip(servers, outcomes, strict=True):
            mine.append(await measure_server(DIALECTS[name](Client(url)), url, args, printer))
    for outcome in outcomes[0]:
        speed = check_speed(outcome, args.max_pause_steps)
        outcome.checks += speed
        show_checks(printer, speed)
    reports = [report(name, url, mine, printer) for (name, url), mine in zip(servers, outcomes, strict=True)]
    if args.peer:
        show_peer(printer, *([run for outcome in mine for run in outcome.runs] for mine in outcomes))
    write_json(args, reports[0] | ({"peer": reports[1]} if args.peer else {}))
    return 1 if reports[0]["failed"] else 0


def main(argv: list[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: asyncio.run(measure_all(args, printer)))


if __name__ == "__main__":
    sys.exit(main())
