#!/usr/bin/env python
"""Soak the loop of rollouts: pauses and updates under load, while trainer, engine and API servers are killed.

    python acceptance/soak.py                                 # make soak: 1,000 cycles
    python acceptance/soak.py --cycles 15 --audit-every 5     # a short one
    python acceptance/soak.py --minutes 60 --out soak.json
    python acceptance/soak.py --report soak.json              # the figures of a run as Markdown

docs/soak.md says what is checked. Exits 1 if a check fails; then the files of the run stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from acceptance.lib.soak.figures import markdown
from acceptance.lib.soak.run import Options, Soak
from benchmarks.lib.report import machine


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="the run ends after so many minutes, or after --cycles")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--audit-every", type=int, default=10, metavar="CYCLES")
    parser.add_argument("--in-flight", type=int, default=12, help="rollouts at once")
    parser.add_argument("--no-kills", action="store_true", help="kill no process: shows the memory of long-lived ones")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the Markdown tables of a report, and end")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        say(markdown(json.loads(args.report.read_text())))
        return 0
    options = Options(args.cycles, args.minutes, args.seed, args.audit_every, args.in_flight, not args.no_kills)
    folder = Path(tempfile.mkdtemp(prefix="fd-soak-"))
    report = asyncio.run(Soak(options, folder, say).run()) | {"machine": machine()}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    say(markdown(report))
    if not report["problems"]:
        shutil.rmtree(folder)
        return 0
    for problem in report["problems"]:
        say(f"BROKEN: {problem}")
    say(f"the files of this run: {folder}")
    again = f"--cycles {args.cycles} --audit-every {args.audit_every} --in-flight {args.in_flight}"
    again += " --no-kills" * args.no_kills
    say(f"to repeat it: python acceptance/soak.py --seed {args.seed} {again}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
