"""Measure policies of routing: ``python benchmarks/fleet.py [--load rollouts --seeds 10 --jobs 2]``; or what several
gateways cost against one: ``python benchmarks/fleet.py --doors 1,2,4,8``.

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
import random
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.fleet.loads import LOADS, Load, Session, alone_s
from benchmarks.lib.fleet.virtual import run_virtually, start_fleet
from benchmarks.lib.report import plain_table
from fastdeploy.client.generation import OUTPUT_INTERVAL_S
from fastdeploy.client.request_stream import Reader
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, Router, Seen, Wanted

TARGET = 0.65  # longest session, ours over consistent hashing
MAIN, OURS, HASHING = "rollouts", "ours", "consistent hashing"
POINTS = 128  # of each replica on the ring of consistent hashing
HEADER = ("policy", "longest s", "mean s", "prefix hits", "tokens recomputed", "first prompts cached")


class _Policy(Router):
    """Another way to choose a replica, to compare with. It counts the load as ours does."""

    def seen(self, request: AddRequest) -> Seen:
        """Return what the client has seen, without the place in the queue that our router gives."""
        seen = super().seen(request)
        seen.began = 0.0
        return seen

    def pick(
        self,
        wanted: Wanted,
        replicas: Sequence[Replica],
        epoch: int = 0,
        refused_by: Collection[str] = (),
    ) -> Route | None:
        there = [replica for replica in replicas if replica.name not in refused_by]
        return Route(self._choose(wanted, there), 0) if there else None

    def _choose(self, wanted: Wanted, replicas: Sequence[Replica]) -> Replica:
        raise NotImplementedError


class RoundRobin(_Policy):
    """One replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = count()

    def _choose(self, wanted: Wanted, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._next) % len(replicas)]


class ConsistentHashing(_Policy):
    """The replica whose point follows that of the session on a ring."""

    def _choose(self, wanted: Wanted, replicas: Sequence[Replica]) -> Replica:
        ring = _ring(tuple(replica.name for replica in replicas))
        at = bisect.bisect(ring, (_point(wanted.session or wanted.group), 0)) % len(ring)
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


class Doors(NamedTuple):
    """num: gateways. sticky: all requests of a session come to one of them, chosen at random; else each one does."""

    num: int
    sticky: bool

    def describe(self) -> str:
        """Return a name for a table."""
        return "1 gateway" if self.num == 1 else f"{self.num} gateways, {'sticky' if self.sticky else 'at random'}"


ONE = Doors(1, False)


class Outcome(NamedTuple):
    """One session. known: prompt tokens that an earlier turn had, too. hits: of these, those that were cached. first,
    first_hits: tokens of the first prompt, and of these, those that were cached."""

    duration_s: float
    known: int
    hits: int
    first: int = 0
    first_hits: int = 0


class Figures(NamedTuple):
    """One run. hit_rate: of the prompt tokens that an earlier turn of the session had, those that were cached.
    recomputed: the others. group_rate: of the first prompts, those that were cached."""

    longest_s: float
    mean_s: float
    hit_rate: float
    recomputed: float
    group_rate: float = 0.0

    def cells(self) -> list[str]:
        rates = f"{self.hit_rate:.1%}", f"{self.recomputed:,.0f}", f"{self.group_rate:.1%}"
        return [f"{self.longest_s:.1f}", f"{self.mean_s:.1f}", *rates]


async def run_session(door: Callable[[], FleetClient], session: Session) -> Outcome:
    """Run a session to its end. door(): returns the gateway of the next request. Raises AssertionError for an answer
    that is too short."""
    await asyncio.sleep(session.start_s)
    now = asyncio.get_running_loop().time
    began, history, known, hits, first_hits = now(), list[int](), 0, 0, 0
    for k, turn in enumerate(session.turns):
        prompt = history + turn.new_tokens
        sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
        name = f"{session.name}-{k}"
        request = AddRequest(name, prompt, sampling, session=session.name, output_interval_s=OUTPUT_INTERVAL_S)
        answer, cached = await generate(door(), request)
        assert len(answer) == turn.answer, f"{session.name}: {len(answer)} tokens instead of {turn.answer}"
        known, hits = known + len(history), hits + min(cached, len(history))
        first_hits += cached * (k == 0)
        history = prompt + answer
        if k + 1 < len(session.turns):
            await asyncio.sleep(turn.pause_s)
    return Outcome(now() - began, known, hits, len(session.turns[0].new_tokens), first_hits)


async def generate(client: FleetClient, request: AddRequest) -> tuple[list[int], int]:
    """Return the tokens of the only choice, and the number of prompt tokens that were cached."""
    tokens, cached, ended = list[int](), 0, False
    with await client.submit(request, Reader()) as stream:
        while not ended:
            await stream.reader.wait()
            for output in stream.read():
                tokens += output.token_ids
                cached += output.cached_tokens
                ended = output.finish_reason is not None
    return tokens, cached


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    """Return the figures of a run."""
    durations, *tokens = zip(*outcomes, strict=True)
    known, hits, first, first_hits = map(sum, tokens)
    rates = hits / max(known, 1), known - hits, first_hits / max(first, 1)
    return Figures(max(durations), mean(durations), *rates)


def median_of(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*map(median, zip(*runs, strict=True)))


async def run(policy: str, load: Load, seed: int, doors: Doors = ONE) -> Figures:
    """Run the sessions of ``seed`` under a policy, on new engines. In virtual time."""
    config = EngineConfig(model="virtual", **load.engine)
    draw = random.Random(seed)
    clients = await start_fleet(load.replicas, [POLICIES[policy]() for _ in range(doors.num)], load.costs, config)
    try:
        sessions = load.make(seed)
        homes = [draw.choice(clients) for _ in sessions]
        ways = [partial(draw.choice, [client] if doors.sticky else clients) for client in homes]
        return figures_of(await asyncio.gather(*map(run_session, ways, sessions)))
    finally:
        for client in reversed(clients):
            await client.close()


def measure(load: str, seed: int, policy: str, doors: Doors = ONE) -> Figures:
    """Run one policy in this process."""
    logging.getLogger("fastdeploy.fleet").setLevel(logging.ERROR)  # a closed gateway says that it loses its replicas
    return run_virtually(run(policy, LOADS[load], seed, doors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default=MAIN)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--doors", default="", help="numbers of gateways, as in 1,2,4,8: measure these with our policy")
    args = parser.parse_args()
    ways = {name: (name, ONE) for name in POLICIES}
    if args.doors:
        numbers = [int(number) for number in args.doors.split(",")]
        doors = [ONE, *(Doors(number, sticky) for number in numbers if number > 1 for sticky in (False, True))]
        ways = {way.describe(): (OURS, way) for way in doors}
    runs: dict[str, list[Figures]] = {name: [] for name in ways}
    pairs = list(product(range(args.seeds), ways))
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, args.load, seed, *ways[name]) for seed, name in pairs]
        for (seed, name), job in zip(pairs, jobs, strict=True):
            print(f"seed {seed}, {name}: {job.result()}", file=sys.stderr)
            runs[name].append(job.result())
    load = LOADS[args.load]
    print(f"{args.load}: {len(load.make(0))} sessions over {load.replicas} replicas; medians of {args.seeds} seeds")
    print(plain_table(HEADER, [[name, *median_of(figures).cells()] for name, figures in runs.items()]))
    if args.doors:
        for name, figures in runs.items():
            pairs_of_runs = zip(figures, runs[ONE.describe()], strict=True)
            ratio = median(several.longest_s / one.longest_s for several, one in pairs_of_runs)
            print(f"{name}: longest session {ratio:.3f} times that of one (median of the seeds' ratios)")
        return
    alone = median(max(alone_s(s, load) for s in load.make(seed)) for seed in range(args.seeds))
    print(f"longest session if each were alone in the fleet: {alone:.1f} s")
    pairs_of_runs = zip(runs[OURS], runs[HASHING], strict=True)
    ratio = median(ours.longest_s / hashing.longest_s for ours, hashing in pairs_of_runs)
    verdict = f"; target: at most {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}" * (args.load == MAIN)
    print(f"longest session, ours over hashing's: {ratio:.2f} (median of the seeds' ratios){verdict}")


if __name__ == "__main__":
    main()
