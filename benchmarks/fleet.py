"""Measure policies of routing: ``python benchmarks/fleet.py [--load rollouts --seeds 10 --jobs 2]``.

Sessions (benchmarks/lib/fleet/loads.py) run through the real gateway's client over real engines, whose runner takes as
long as a large model would. Time is virtual, so the figures depend on the seed only. Each policy gets the same sessions
and new engines. A row has the medians over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.fleet.load import Figures, figures_of, median_of, run_session
from benchmarks.lib.fleet.loads import LOADS, Load, alone_s
from benchmarks.lib.fleet.policies import POLICIES
from benchmarks.lib.fleet.virtual import run_virtually, start_fleet
from benchmarks.lib.report import plain_table
from fastdeploy.core.config import EngineConfig

TARGET = 0.65  # longest session, ours over consistent hashing
MAIN, OURS, HASHING = "rollouts", "ours", "consistent hashing"
COLUMNS: dict[str, Callable[[Figures], str]] = {
    "longest s": lambda f: f"{f.longest_s:.1f}",
    "p99 s": lambda f: f"{f.p99_s:.1f}",
    "mean s": lambda f: f"{f.mean_s:.1f}",
    "short p99 s": lambda f: f"{f.short_p99_s:.1f}",
    "short mean s": lambda f: f"{f.short_mean_s:.1f}",
    "prefix hits": lambda f: f"{f.hit_rate:.1%}",
    "tokens recomputed": lambda f: f"{f.recomputed:,.0f}",
}


async def run(policy: str, load: Load, seed: int) -> Figures:
    """Run the sessions of ``seed`` under a policy, on new engines. In virtual time."""
    client = await start_fleet(
        load.replicas, POLICIES[policy](), load.costs, EngineConfig(model="virtual", **load.engine)
    )
    try:
        return figures_of(await asyncio.gather(*(run_session(client, session) for session in load.make(seed))))
    finally:
        await client.close()


def measure(load: str, seed: int, policy: str) -> Figures:
    """Run one policy in this process."""
    logging.getLogger("fastdeploy.fleet").setLevel(logging.ERROR)  # a closed gateway says that it loses its replicas
    return run_virtually(run(policy, LOADS[load], seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS, default=MAIN)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs: dict[str, list[Figures]] = {name: [] for name in args.policies}
    pairs = list(product(range(args.seeds), args.policies))
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, args.load, seed, name) for seed, name in pairs]
        for (seed, name), job in zip(pairs, jobs, strict=True):
            print(f"seed {seed}, {name}: {job.result()}", file=sys.stderr)
            runs[name].append(job.result())
    rows = {name: median_of(figures) for name, figures in runs.items()}
    if args.json:
        print(json.dumps({name: asdict(figures) for name, figures in rows.items()}))
        return
    load = LOADS[args.load]
    alone = statistics.median(max(alone_s(s, load) for s in load.make(seed)) for seed in range(args.seeds))
    print(f"{args.load}: {len(load.make(0))} sessions over {load.replicas} replicas; medians of {args.seeds} seeds")
    cells = [[name, *(show(figures) for show in COLUMNS.values())] for name, figures in rows.items()]
    print(plain_table(["policy", *COLUMNS], cells))
    print(f"longest session if each were alone in the fleet: {alone:.1f} s")
    if {OURS, HASHING} <= rows.keys():
        pairs_of_runs = zip(runs[OURS], runs[HASHING], strict=True)
        ratio = statistics.median(ours.longest_s / hashing.longest_s for ours, hashing in pairs_of_runs)
        verdict = f"; target: at most {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}" * (args.load == MAIN)
        print(f"longest session, ours over hashing's: {ratio:.2f} (median of the seeds' ratios){verdict}")


if __name__ == "__main__":
    main()
