"""Measure policies of routing: ``python benchmarks/fleet.py [--load rollouts --seeds 10 --jobs 2]``.

Sessions (benchmarks/lib/fleet/loads.py) run through the real gateway's client over real engines, whose runner takes as
long as a large model would. Time is virtual, so the figures depend on the seed only. Each policy gets the same sessions
and new engines. A row has the medians over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import hashlib
import logging
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import count, product
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.fleet.loads import LOADS, Load, Session, alone_s
from benchmarks.lib.fleet.virtual import run_virtually, start_fleet
from benchmarks.lib.report import plain_table
from fastdeploy.client.request_stream import Reader
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, Router, Seen

TARGET = 0.65  # longest session, ours over consistent hashing
MAIN, OURS, HASHING = "rollouts", "ours", "consistent hashing"
POINTS = 128  # of each replica on the ring of consistent hashing
HEADER = ("policy", "longest s", "mean s", "prefix hits", "tokens recomputed")


class _Policy(Router):
    """Another way to choose a replica, to compare with. It counts the load as ours does."""

    def seen(self, request: AddRequest) -> Seen:
        """Return what the client has seen, without the place in the queue that our router gives."""
        seen = super().seen(request)
        seen.began = 0.0
        return seen

    def pick(
        self, request: AddRequest, replicas: Sequence[Replica], epoch: int = 0, refused_by: Collection[str] = ()
    ) -> Route | None:
        there = [replica for replica in replicas if replica.name not in refused_by]
        return self.route_to(self._choose(request, there), request) if there else None

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        raise NotImplementedError


class RoundRobin(_Policy):
    """One replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = count()

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._next) % len(replicas)]


class ConsistentHashing(_Policy):
    """The replica whose point follows that of the session on a ring."""

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        ring = _ring(tuple(replica.name for replica in replicas))
        at = bisect.bisect(ring, (_point(request.session or request.request_id), 0)) % len(ring)
        return replicas[ring[at][1]]


class OrderedHashing(ConsistentHashing):
    """Consistent hashing with our order in the queues: it shows what the choice of the replica adds to the order."""

    def seen(self, request: AddRequest) -> Seen:
        return Router.seen(self, request)


POLICIES: dict[str, type[Router]] = {
    "ours": Router,
    "round robin": RoundRobin,
    "consistent hashing": ConsistentHashing,
    "hashing, our order": OrderedHashing,
}


@cache
def _ring(names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the points on the ring, each with the number of its replica."""
    return sorted((_point(f"{name}/{i}"), k) for k, name in enumerate(names) for i in range(POINTS))


def _point(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


class Outcome(NamedTuple):
    """One session. known: prompt tokens that an earlier turn had, too. hits: of these, those that were cached."""

    duration_s: float
    known: int
    hits: int


class Figures(NamedTuple):
    """One run. hit_rate: of the prompt tokens that an earlier turn of the session had, those that were cached.
    recomputed: the others."""

    longest_s: float
    mean_s: float
    hit_rate: float
    recomputed: float

    def cells(self) -> list[str]:
        return [f"{self.longest_s:.1f}", f"{self.mean_s:.1f}", f"{self.hit_rate:.1%}", f"{self.recomputed:,.0f}"]


async def run_session(client: FleetClient, session: Session) -> Outcome:
    """Run a session to its end. Raises AssertionError for an answer that is too short."""
    await asyncio.sleep(session.start_s)
    now = asyncio.get_running_loop().time
    began, history, known, hits = now(), list[int](), 0, 0
    for k, turn in enumerate(session.turns):
        prompt = history + turn.new_tokens
        sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"{session.name}-{k}", prompt, sampling, session=session.name)
        answer, cached = await generate(client, request)
        assert len(answer) == turn.answer, f"{session.name}: {len(answer)} tokens instead of {turn.answer}"
        known, hits = known + len(history), hits + min(cached, len(history))
        history = prompt + answer
        if k + 1 < len(session.turns):
            await asyncio.sleep(turn.pause_s)
    return Outcome(now() - began, known, hits)


async def generate(client: FleetClient, request: AddRequest) -> tuple[list[int], int]:
    """Return the tokens of the only choice, and the number of prompt tokens that were cached."""
    tokens, cached, ended = list[int](), 0, False
    with await client.submit(request, Reader(for_tokens=False)) as stream:
        while not ended:
            await stream.reader.wait()
            for output in stream.read():
                tokens += output.token_ids
                cached += output.cached_tokens
                ended = output.finish_reason is not None
    return tokens, cached


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    """Return the figures of a run."""
    durations, known, hits = zip(*outcomes, strict=True)
    return Figures(max(durations), mean(durations), sum(hits) / max(sum(known), 1), sum(known) - sum(hits))


def median_of(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*map(median, zip(*runs, strict=True)))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default=MAIN)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    runs: dict[str, list[Figures]] = {name: [] for name in POLICIES}
    pairs = list(product(range(args.seeds), POLICIES))
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, args.load, seed, name) for seed, name in pairs]
        for (seed, name), job in zip(pairs, jobs, strict=True):
            print(f"seed {seed}, {name}: {job.result()}", file=sys.stderr)
            runs[name].append(job.result())
    load = LOADS[args.load]
    alone = median(max(alone_s(s, load) for s in load.make(seed)) for seed in range(args.seeds))
    print(f"{args.load}: {len(load.make(0))} sessions over {load.replicas} replicas; medians of {args.seeds} seeds")
    print(plain_table(HEADER, [[name, *median_of(figures).cells()] for name, figures in runs.items()]))
    print(f"longest session if each were alone in the fleet: {alone:.1f} s")
    pairs_of_runs = zip(runs[OURS], runs[HASHING], strict=True)
    ratio = median(ours.longest_s / hashing.longest_s for ours, hashing in pairs_of_runs)
    verdict = f"; target: at most {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}" * (args.load == MAIN)
    print(f"longest session, ours over hashing's: {ratio:.2f} (median of the seeds' ratios){verdict}")


if __name__ == "__main__":
    main()
