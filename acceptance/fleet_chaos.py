"""Pause a fleet while its replicas and gateways are killed, stopped and slowed: ``python acceptance/fleet_chaos.py
--pauses 1000``.

Engines and gateways are processes of their own. The engines have a runner that sleeps; the gateways answer at one port.
In each cycle the fleet is paused and resumed, some replicas and one gateway are harmed, every engine is asked directly,
and each token of a steady load is compared with the token that the weights of its span give. A request whose gateway
dies is sent again with its id. Exits 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from acceptance.lib.chaos.doors import LOG_FORMAT
from acceptance.lib.chaos.options import Options, Pause
from acceptance.lib.chaos.run import Chaos
from benchmarks.lib.report import plain_table
from fastdeploy.bench.stats import percentile
from fastdeploy.core.process import collect_rarely

TARGET_MS = 50.0  # above one step


def excess_ms(pauses: Sequence[Pause], step_s: float) -> list[float]:
    """Return the milliseconds of each pause above one step."""
    return [(pause.seconds - step_s) * 1000 for pause in pauses]


def report(chaos: Chaos) -> str:
    """Return the tables of a run."""
    step_s = chaos.options.step_s
    at_once = [pause for pause in chaos.pauses if pause.mode != "wait"]
    rows, p99 = [], percentile(excess_ms(at_once, step_s), 99)
    for name, pauses in (
        ("all", at_once),
        ("a gateway was harmed", [pause for pause in at_once if pause.door]),
        ("no gateway was harmed", [pause for pause in at_once if not pause.door]),
        ("of these: engines were harmed", [pause for pause in at_once if pause.harmed and not pause.door]),
        ("with a fence", [pause for pause in at_once if pause.fenced]),
        ("without a fence", [pause for pause in at_once if not pause.fenced]),
    ):
        if pauses:
            excess = excess_ms(pauses, step_s)
            rows.append([name, str(len(pauses)), *(f"{percentile(excess, part):.1f}" for part in (50, 90, 99, 100))])
    restarts = Counter(
        (restart.harm or "not harmed", restart.why.partition(":")[0]) for restart in chaos.launcher.restarts
    )
    return "\n".join(
        [
            f"keep and abort: ms above one step of {step_s * 1000:g} ms",
            plain_table(["pauses", "number", "median", "p90", "p99", "max"], rows),
            f"target: p99 at most {TARGET_MS:g} ms: {'met' if p99 <= TARGET_MS else 'MISSED'}",
            "",
            plain_table(
                ["engine was", "fenced or restarted because", "number"],
                [[harm, why, str(number)] for (harm, why), number in restarts.most_common()],
            ),
            "",
            plain_table(["count", ""], [[what, f"{number:,}"] for what, number in sorted(chaos.ledger.counts.items())]),
        ]
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_average() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--pauses", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--fence-ms", type=float, default=30.0, help="fence_after_s of the fleet, above a step")
    parser.add_argument("--verbose", action="store_true", help="show what is done, and the logs of the gateways")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.CRITICAL, format=LOG_FORMAT)
    before = load_average()
    if not args.verbose:
        for what in ("benchmarks", "acceptance"):
            logging.getLogger(what).setLevel(logging.ERROR)  # a problem is shown when it is found
    options = Options(args.replicas, args.gateways, args.pauses, args.seed, fence_s=args.fence_ms / 1000)
    chaos = Chaos(options, say)
    uvloop.run(chaos.run())
    fleet = f"{args.replicas} replicas, {args.gateways} gateways"
    print(f"{fleet}, {args.pauses} cycles, seed {args.seed}; {before} before, {load_average()} after")
    print(report(chaos))
    for problem in chaos.ledger.problems:
        print(f"WRONG: {problem}")
    return 1 if chaos.ledger.problems else 0


if __name__ == "__main__":
    collect_rarely()
    sys.exit(main())
