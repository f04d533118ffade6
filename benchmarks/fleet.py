"""Measure policies of routing: ``python benchmarks/fleet.py [--replicas 8 --sessions 160 --seeds 3]``.

Sessions of agents (benchmarks/lib/fleet/load.py) run over engines in processes of their own, through the real gateway's
client. The engines run on a runner that sleeps as long as a large model would compute. Each policy gets the same
sessions and new engines. A row has the medians over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.load import COSTS, ENGINE, Figures, figures_of, make_sessions, median_of, run_session
from benchmarks.lib.fleet.policies import POLICIES
from benchmarks.lib.fleet.runner import Costs
from benchmarks.lib.report import plain_table
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import StaticLauncher
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

logging.getLogger("fastdeploy.fleet").setLevel(logging.ERROR)  # a gateway that closes says that it loses its replicas
TARGET = 0.65  # longest session, ours over consistent hashing


async def run(policy: str, replicas: int, sessions: int, seed: int, max_turns: int, costs: Costs = COSTS) -> Figures:
    """Run the sessions of ``seed`` under a policy, on new engines."""
    load = make_sessions(sessions, seed, max_turns)
    with FakeEngines(costs) as engines:
        launcher = StaticLauncher(engines.start(replicas, **ENGINE))
        config = FleetConfig(fleet_id="benchmark", stall_s=60.0)
        client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint), POLICIES[policy]())
        client.start()
        while len(client.membership.open) < replicas:
            await asyncio.sleep(0.01)
        try:
            return figures_of(await asyncio.gather(*(run_session(client, session) for session in load)))
        finally:
            await client.close()


def table(rows: dict[str, Figures]) -> str:
    """Return a table of the figures of each policy, the last column over consistent hashing."""
    hashing = rows.get("consistent hashing")
    lines = [
        [
            name,
            f"{f.longest_s:.1f}",
            f"{f.mean_s:.1f}",
            f"{f.hit_rate:.1%}",
            f"{f.recomputed:,}",
            f"{f.longest_s / hashing.longest_s:.2f}" if hashing else "-",
        ]
        for name, f in rows.items()
    ]
    header = ["policy", "longest s", "mean s", "prefix hits", "tokens recomputed", "longest / hashing"]
    return plain_table(lines, header)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--max-turns", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs: dict[str, list[Figures]] = {name: [] for name in args.policies}
    for seed in range(args.seeds):
        for name in args.policies:
            figures = uvloop.run(run(name, args.replicas, args.sessions, seed, args.max_turns))
            print(f"seed {seed}, {name}: {figures}", file=sys.stderr)
            runs[name].append(figures)
    rows = {name: median_of(figures) for name, figures in runs.items()}
    if args.json:
        print(json.dumps({name: asdict(figures) for name, figures in rows.items()}))
        return
    print(f"{args.sessions} sessions over {args.replicas} replicas; medians of {args.seeds} seeds")
    print(table(rows))
    if {"ours", "consistent hashing"} <= rows.keys():
        ratio = rows["ours"].longest_s / rows["consistent hashing"].longest_s
        print(f"target: at most {TARGET} of hashing's longest session: {'met' if ratio <= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
