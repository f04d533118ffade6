"""Pause a fleet while its replicas are killed, stopped and slowed: ``python acceptance/fleet_chaos.py --pauses 1000``.

The engines are processes of their own on a runner that sleeps. In each cycle the fleet is paused and resumed, some
replicas are harmed, every engine is asked directly, and each token of a steady load is compared with the token that
the weights of its span give. Exits 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from acceptance.lib.chaos.figures import report
from acceptance.lib.chaos.run import Chaos, Options
from fastdeploy.core.process import collect_rarely


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_average() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--pauses", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--step-ms", type=float, default=30.0, help="of a replica")
    parser.add_argument("--fence-ms", type=float, default=30.0, help="fence_after_s of the fleet, above a step")
    parser.add_argument("--harm", type=float, default=0.1, help="part of the replicas that is harmed in a cycle")
    parser.add_argument("--sessions", type=int, default=16, help="requests at once")
    parser.add_argument("--verbose", action="store_true", help="show the log of the gateway")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.CRITICAL, format="%(asctime)s %(message)s")
    before = load_average()
    logging.getLogger("benchmarks").setLevel(logging.ERROR)
    options = Options(
        args.replicas,
        args.pauses,
        args.seed,
        args.harm,
        step_s=args.step_ms / 1000,
        fence_s=args.fence_ms / 1000,
        sessions=args.sessions,
    )
    chaos = Chaos(options, say)
    uvloop.run(chaos.run())
    print(f"{args.replicas} replicas, {args.pauses} cycles, seed {args.seed}; {before} before, {load_average()} after")
    print(report(chaos))
    for problem in chaos.ledger.problems:
        print(f"WRONG: {problem}")
    return 1 if chaos.ledger.problems else 0


if __name__ == "__main__":
    collect_rarely()
    sys.exit(main())
