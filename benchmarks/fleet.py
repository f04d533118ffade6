"""Measure policies of routing: ``python benchmarks/fleet.py [--load rollouts --seeds 10 --jobs 2]``.

Sessions (benchmarks/lib/fleet/loads.py) run through the real gateway's client over real engines, whose runner takes as
long as a large model would. Time is virtual, so the figures depend on the seed only. With --real the engines are
processes that sleep, and the machine must be idle. Each policy gets the same sessions and new engines. A row has the
medians over the seeds.
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
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path

import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.load import Figures, figures_of, median_of, run_session
from benchmarks.lib.fleet.loads import LOADS, Load, alone_s
from benchmarks.lib.fleet.policies import POLICIES
from benchmarks.lib.fleet.virtual import run_virtually, start_fleet
from benchmarks.lib.report import plain_table
from fastdeploy.core.config import EngineConfig
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import StaticLauncher
from fastdeploy.fleet.router import Router
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

TARGET = 0.65  # longest session, ours over consistent hashing
MAIN, OURS, HASHING = "rollouts", "ours", "consistent hashing"


async def run(policy: str, load: Load, seed: int, real: bool = False) -> Figures:
    """Run the sessions of ``seed`` under a policy, on new engines."""
    router = POLICIES[policy]()
    with ExitStack() as stack:
        if real:
            engines = stack.enter_context(FakeEngines(load.costs))
            client = await _connect(engines, load, router)
        else:
            client = await start_fleet(load.replicas, router, load.costs, EngineConfig(model="virtual", **load.engine))
        try:
            return figures_of(await asyncio.gather(*(run_session(client, session) for session in load.make(seed))))
        finally:
            await client.close()


async def _connect(engines: FakeEngines, load: Load, router: Router) -> FleetClient:
    launcher = StaticLauncher(engines.start(load.replicas, **load.engine))
    config = FleetConfig(fleet_id="benchmark", stall_s=60.0)
    client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint), router)
    client.start()
    while len(client.membership.open) < load.replicas:
        await asyncio.sleep(0.01)
    return client


def measure(load: str, real: bool, seed: int, policy: str) -> Figures:
    """Run one policy in this process."""
    runner: Callable = uvloop.run if real else run_virtually
    return runner(run(policy, LOADS[load], seed, real))


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "longest s": lambda f: f"{f.longest_s:.1f}",
    "p99 s": lambda f: f"{f.p99_s:.1f}",
    "mean s": lambda f: f"{f.mean_s:.1f}",
    "short p99 s": lambda f: f"{f.short_p99_s:.1f}",
    "short mean s": lambda f: f"{f.short_mean_s:.1f}",
    "prefix hits": lambda f: f"{f.hit_rate:.1%}",
    "tokens recomputed": lambda f: f"{f.recomputed:,.0f}",
}


def table(rows: dict[str, Figures], ratio: float | None) -> str:
    """Return a table of the figures of each policy. ratio: see ``main``."""
    lines = [[name, *(show(figures) for show in COLUMNS.values())] for name, figures in rows.items()]
    end = "" if ratio is None else f"\nlongest session, ours over hashing's: {ratio:.2f} (median of the seeds' ratios)"
    return plain_table(["policy", *COLUMNS], lines) + end


def _be_quiet() -> None:
    """Log errors only, since a gateway that closes says that it loses its replicas."""
    logging.getLogger("fastdeploy.fleet").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS, default=MAIN)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--jobs", type=int, default=1, help="processes; always 1 with --real")
    parser.add_argument("--real", action="store_true", help="processes that sleep, instead of virtual time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs: dict[str, list[Figures]] = {name: [] for name in args.policies}
    pairs = list(product(range(args.seeds), args.policies))
    with ProcessPoolExecutor(1 if args.real else args.jobs, initializer=_be_quiet) as pool:
        jobs = [pool.submit(measure, args.load, args.real, seed, name) for seed, name in pairs]
        for (seed, name), job in zip(pairs, jobs, strict=True):
            print(f"seed {seed}, {name}: {job.result()}", file=sys.stderr)
            runs[name].append(job.result())
    rows = {name: median_of(figures) for name, figures in runs.items()}
    if args.json:
        print(json.dumps({name: asdict(figures) for name, figures in rows.items()}))
        return
    load = LOADS[args.load]
    alone = statistics.median(max(alone_s(s, load) for s in load.make(seed)) for seed in range(args.seeds))
    ratio = None
    if {OURS, HASHING} <= rows.keys():
        pairs_of_runs = zip(runs[OURS], runs[HASHING], strict=True)
        ratio = statistics.median(ours.longest_s / hashing.longest_s for ours, hashing in pairs_of_runs)
    print(f"{args.load}: {len(load.make(0))} sessions over {load.replicas} replicas; medians of {args.seeds} seeds")
    print(table(rows, ratio))
    print(f"longest session if each were alone in the fleet: {alone:.1f} s")
    if ratio is not None and args.load == MAIN:
        print(f"target: at most {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
