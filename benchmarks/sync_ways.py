#!/usr/bin/env python
"""Measure what each way of syncing weights costs an asynchronous trainer, and account for every token.

    python benchmarks/sync_ways.py                             # all ways, 3 seeds, some 30 minutes
    python benchmarks/sync_ways.py --ways keep,live --seeds 1 --seconds 30
    python benchmarks/sync_ways.py --plot-only                 # tables and plots of the finished runs

Each run starts a server and trains the embedded model with examples/async_grpo, for the same time from the same start.
Finished runs are kept in ``--out`` and are not made again. A control run has an engine whose KV survives commits: its
mismatch shows that the measurement would find such a fault. Writes the plots and the tables of docs/sync-ways.md.

Exits 1 if a token is unexplained, or if a mismatch is not as it must be; 2 if a run fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.report import Printer, some_of
from benchmarks.lib.ways.figures import wrong_mismatches
from benchmarks.lib.ways.ledger import mistakes
from benchmarks.lib.ways.record import CONTROL, WAYS, Record, read
from benchmarks.lib.ways.runs import Plan, folder_of, is_done, missing, run
from benchmarks.lib.ways.table import fill_in, tables

ROOT = Path(__file__).resolve().parent.parent
GROUP, GROUPS, CONCURRENCY = 8, 8, 12  # small updates: a run of about a minute has some 30 commits
SERVER = ("--dtype", "bfloat16")
TRAINER = ("--group", str(GROUP), "--groups", str(GROUPS), "--concurrency", str(CONCURRENCY), "--target", "2",
           "--checkpoint-every", "0", "--eval-problems", "200", "--eval-every", "8")  # fmt: skip
SLACK_S = 180.0  # beyond --seconds: start of the trainer, last evaluation
NAMES = {way.name.replace(", ", "-"): way for way in WAYS} | {"stale": CONTROL}


def plan_of(args: argparse.Namespace) -> Plan:
    trainer = [*TRAINER, "--minutes", f"{args.seconds / 60:g}", *args.trainer.split()]
    if args.updates is not None:
        trainer += ["--updates", str(args.updates)]
    server = (*SERVER, "--max-num-seqs", str(args.max_num_seqs))
    return Plan(server, tuple(trainer), args.seconds + SLACK_S)


def measure(plan: Plan, args: argparse.Namespace, printer: Printer) -> None:
    left = missing(plan, args.out, args.ways, range(args.seeds))
    for number, (way, seed) in enumerate(left, 1):
        printer.say(f"run {number} of {len(left)}: {way.name}, seed {seed}")
        run(plan, way, seed, folder_of(args.out, way, seed))


def report(records: Sequence[Record], docs: Path | None, printer: Printer) -> list[str]:
    """Print the tables. Write them into the page in ``docs``, with the plots. Return what is wrong."""
    found = tables(records)
    for name, table in found.items():
        print(f"{name}\n\n{table}")
    if docs is not None:
        from benchmarks.lib.ways.plots import write_plots  # needs matplotlib

        for name, path in write_plots(records, docs).items():
            found[f"{name} plot"] = f"![{name}]({path.name})\n"
            printer.say(f"wrote {path}")
        fill_in(docs / "sync-ways.md", found)
    return [
        f"{record.way.name}, seed {record.seed}: {line}"
        for record in records
        for line in (*mistakes(record), *wrong_mismatches(record))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ways", type=some_of(NAMES), default=list(NAMES), help=f"default: {','.join(NAMES)}")
    add("--seeds", type=int, default=3, help="runs of each way (%(default)s)")
    add("--seconds", type=float, default=70.0, help="length of each run (%(default)g)")
    add("--updates", type=int, help="end a run after so many updates, if that is sooner")
    seats = "sequences in the server's batch; fewer make sampling the bottleneck (%(default)s)"
    add("--max-num-seqs", type=int, default=GROUP * CONCURRENCY, metavar="N", help=seats)
    add("--trainer", default="", metavar="FLAGS", help="further flags of examples.async_grpo, in one argument")
    add("--out", type=Path, default=ROOT / "build" / "sync-ways", help="folder of the runs (%(default)s)")
    add("--docs", type=Path, help="folder of sync-ways.md, which gets the tables and the plots")
    add("--plot-only", action="store_true", help="make no run, use those that are finished")
    args = parser.parse_args(argv)
    args.ways = [NAMES[name] for name in args.ways]
    return args


def make_and_report(args: argparse.Namespace, printer: Printer) -> int:
    plan = plan_of(args)
    if not args.plot_only:
        measure(plan, args, printer)
    runs = [(way, seed) for way in args.ways for seed in range(args.seeds)]
    folders = [folder for way, seed in runs if is_done(plan, folder := folder_of(args.out, way, seed))]
    if not folders:
        raise ValueError(f"{args.out} has no finished run with these settings")
    return printer.failed(report([read(folder) for folder in folders], args.docs, printer), "WRONG")


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: make_and_report(args, printer))


if __name__ == "__main__":
    sys.exit(main())
