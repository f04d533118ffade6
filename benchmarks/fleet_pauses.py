"""Measure calls, joins and losses of idle replicas in processes: ``python -m benchmarks.fleet_pauses [--replicas 256
--gateways 8]``.

Each gateway and each engine, which has no model, is a process of its own. A call goes to the gateway that leads. A
pause sends four messages for each replica: call, fence, acknowledgement, report. A join storm begins when all gateways
connect to engines that wait for them, and it ends, as a loss does, when every gateway has all members. All processes
share the cores, so the times depend on them; the CPU times do so less. benchmarks/fleet_scale.py measures the same in
virtual time, and the bytes of all messages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.gateways import Gateways, Look
from benchmarks.lib.fleet.runner import Costs
from benchmarks.lib.processes import own_bytes
from benchmarks.lib.report import plain_table
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m

IDLE_S = 3.0
POLL_S = 0.02
PATIENCE_S = 300.0
HOLD = "benchmark"
HEADER = ("replicas", "gateways", "what", "s", "most s", "leader ms", "us/replica", "other ms", "engine us")


class Figures(NamedTuple):
    """The costs of one event. seconds: on the clock. leader_s, others_s: CPU of the gateway that leads, and the mean of
    the others. engines_s: mean CPU of an engine that lives at the end."""

    seconds: float
    leader_s: float
    others_s: float
    engines_s: float


class Memory(NamedTuple):
    """Bytes that a process shares with no other one: means."""

    engine: float
    gateway: float


class Fleet:
    """``num`` idle engines, and ``num_gateways`` gateways that have not connected to them yet. Use as a context."""

    def __init__(self, num: int, num_gateways: int):
        self.num = num
        self._engines = FakeEngines(Costs(prompt_s=1e-6))
        placements = self._engines.start(num)
        self._names = [placement.name for placement in placements]
        config = FleetConfig(fleet_id="benchmark", fence_after_s=60.0, stall_s=60.0, model_roots=("/",))
        self._gateways = Gateways(config, placements, num_gateways)

    def __enter__(self) -> Fleet:
        self._looks()  # all processes are there
        return self

    def __exit__(self, *exc: object) -> None:
        self._gateways.close()
        self._engines.close()

    def figures_of(self, work: Callable[[], object]) -> Figures:
        """Do ``work``, and return what it took."""
        before, engines, began = self._looks(), self._engines.cpu_seconds(), time.perf_counter()
        work()
        seconds, after = time.perf_counter() - began, self._looks()
        used = [look.cpu_s - then.cpu_s for look, then in zip(after, before, strict=True)]
        others = [cpu_s for cpu_s, look in zip(used, after, strict=True) if not look.leads]
        spent = [cpu_s - engines.get(pid, 0.0) for pid, cpu_s in self._engines.cpu_seconds().items()]
        return Figures(seconds, sum(used) - sum(others), mean(others) if others else 0.0, mean(spent))

    def memory(self) -> Memory:
        """Return what a process needs now."""
        gateways = [gateway.process.pid or 0 for gateway in self._gateways.all]
        return Memory(mean(map(own_bytes, self._engines.cpu_seconds())), mean(map(own_bytes, gateways)))

    # ------------------------------------------------------------------ events

    def start(self) -> None:
        """Let all gateways connect, and wait until every one has all engines as members."""
        for gateway in self._gateways.all:
            gateway.start()
        self._until_complete({})

    def call(self, args: m.Args) -> dict[str, Any]:
        """Make a call at the gateway that leads. Raises RuntimeError unless all replicas have done it."""
        leader = next(gateway for gateway, look in zip(self._gateways.all, self._looks(), strict=True) if look.leads)
        report = leader.call(args)
        if [entry["status"] for entry in report["replicas"]] != ["done"] * self.num:
            raise RuntimeError(f"not all of {self.num} replicas did it: {report['replicas']}")
        return report

    def kill(self, num: int) -> None:
        """Kill the first ``num`` engines, start new ones, and wait until every gateway has these as members."""
        before = self._looks()[0].boots
        for i in range(num):
            self._engines.kill(i)
        self._engines.restart(*range(num))
        self._until_complete({name: before[name] for name in self._names[:num]})

    def _until_complete(self, old: dict[str, str]) -> None:
        """Wait until every gateway has all members. old: boot ids that are no more, by name."""
        end = time.monotonic() + PATIENCE_S
        for gateway in self._gateways.all:
            while len((look := gateway.look()).boots) < self.num or old.items() & look.boots.items():
                if time.monotonic() > end:
                    raise RuntimeError(f"only {len(look.boots)} of {self.num} replicas are members")
                time.sleep(POLL_S)

    def _looks(self) -> list[Look]:
        return [gateway.look() for gateway in self._gateways.all]


def measure(fleet: Fleet, rounds: int, idle_s: float = IDLE_S) -> Iterator[tuple[str, list[Figures]]]:
    """Let the gateways connect, make calls, and kill engines of the fleet while it is held. Yield the figures of each
    event."""
    yield "join storm", [fleet.figures_of(fleet.start)]
    idle = fleet.figures_of(lambda: time.sleep(idle_s))
    yield "1 s idle", [Figures(*(value / idle_s for value in idle))]
    pauses, resumes = [], []
    for _ in range(rounds):
        pauses.append(fleet.figures_of(lambda: fleet.call(m.PauseArgs("keep", hold_id=HOLD))))
        resumes.append(fleet.figures_of(lambda: fleet.call(m.ResumeArgs(HOLD))))
    yield "pause", pauses
    yield "resume", resumes
    update = m.UpdateWeightsArgs(source=FolderSource("/w1"))
    yield "update", [fleet.figures_of(lambda: fleet.call(update))]
    fleet.call(m.PauseArgs("keep", hold_id=HOLD))
    yield "a tenth killed", [fleet.figures_of(lambda: fleet.kill(-(-fleet.num // 10)))]
    yield "all killed", [fleet.figures_of(lambda: fleet.kill(fleet.num))]
    fleet.call(m.ResumeArgs(HOLD))  # refused by an engine that came back without the hold


def cells(num: int, gateways: int, what: str, rounds: Sequence[Figures]) -> list[str]:
    """Return a row of the table: medians of the rounds, and the longest time."""
    middle = Figures(*map(median, zip(*rounds, strict=True)))
    return [
        str(num),
        str(gateways),
        what,
        f"{middle.seconds:.3f}",
        f"{max(figures.seconds for figures in rounds):.3f}",
        f"{1e3 * middle.leader_s:.1f}",
        f"{1e6 * middle.leader_s / num:.0f}",
        f"{1e3 * middle.others_s:.1f}",
        f"{1e6 * middle.engines_s:.0f}",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=20, help="pauses and resumes")
    args = parser.parse_args(argv)
    rows = []
    for num in args.replicas:
        for gateways in args.gateways:
            with Fleet(num, gateways) as fleet:
                for what, rounds in measure(fleet, args.rounds):
                    rows.append(cells(num, gateways, what, rounds))
                    print("  ".join(rows[-1]), file=sys.stderr)
                engine, gateway = (f"{used / 2**20:.1f}" for used in fleet.memory())
                print(f"{num} replicas, {gateways} gateways: MiB of an engine {engine}, of a gateway {gateway}")
    print(plain_table(HEADER, rows))
    return 0


if __name__ == "__main__":
    main()
