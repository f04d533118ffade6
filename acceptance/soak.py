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
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from acceptance.lib.soak.flat import BOUNDS
from acceptance.lib.soak.run import Options, Soak
from benchmarks.lib.report import machine, markdown

LEDGER = {
    "engines": "engines",
    "rollouts": "rollouts, each with one final output",
    "generated": "tokens that the engines counted; killed ones: just before",
    "received": "tokens in the clients' hands",
    "undelivered": "read back from broken attempts",
    "missing": "of that count, missing after a kill",
    "lost_results": "results that a killed engine took along",
}
GROWTH = ("process", "quantity", "least", "greatest", "growth in 1,000 cycles", "bound", "over cycles")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="the run ends after so many minutes, or after --cycles")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--audit-every", type=int, default=10, metavar="CYCLES")
    parser.add_argument("--in-flight", type=int, default=12, help="rollouts at once")
    no_kills = "kill no process: shows the memory of long-lived ones"
    parser.add_argument("--no-kills", action="store_false", dest="kills", help=no_kills)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the Markdown tables of a report, and end")
    return parser.parse_args(argv)


def figures(report: dict[str, Any]) -> str:
    """Return the tables of a report: what happened, the ledger, and what the processes held while idle."""
    facts = [("minutes", f"{report['seconds'] / 60:.1f}"), ("seed", report["options"]["seed"])]
    happened = markdown(("what happened", "count"), [*facts, *sorted(report["seen"].items())])
    ledger = markdown(("ledger", "count"), [(shown, report["ledger"][name]) for name, shown in LEDGER.items()])
    return "\n".join([happened, ledger, markdown(GROWTH, map(growth_row, report["resources"]))])


def growth_row(row: dict[str, Any]) -> tuple[Any, ...]:
    bound = BOUNDS[row["quantity"]]
    slope = "too short" if row["slope_per_1000"] is None else f"{round(row['slope_per_1000'], 1) + 0.0:+.1f}"
    name = f"{row['role']} ({row['processes']})" if row["processes"] > 1 else row["role"]
    least, greatest = f"{row['least']:.4g}", f"{row['greatest']:.4g}"
    return name, bound.name, least, greatest, slope, f"{bound.per_1000:g}", row["longest_cycles"]


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        say(figures(json.loads(args.report.read_text())))
        return 0
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    folder = Path(tempfile.mkdtemp(prefix="fd-soak-"))
    report = asyncio.run(Soak(options, folder, say).run()) | {"machine": machine()}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    say(figures(report))
    if not report["problems"]:
        shutil.rmtree(folder)
        return 0
    for problem in report["problems"]:
        say(f"BROKEN: {problem}")
    say(f"the files of this run: {folder}")
    again = f"--cycles {args.cycles} --audit-every {args.audit_every} --in-flight {args.in_flight}"
    again += " --no-kills" * (not args.kills)
    say(f"to repeat it: python acceptance/soak.py --seed {args.seed} {again}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
