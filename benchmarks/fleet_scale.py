"""Measure control calls, joins and losses of a large fleet in virtual time.

    python -m benchmarks.fleet_scale --engines 64 256 1024 --gateways 1 8
    python -m benchmarks.fleet_scale --engines 1024 --relays 8 32 --socket-us 30

Real: the code of gateways and engines, whose CPU is measured callback by callback, and the encoding of each message.
Modelled: each process has a core of its own, on a host of its own; a socket takes ``--socket-us`` of CPU for each
message and end (the default is what benchmarks/fleet_pauses.py shows above the figures of this program); a message
takes 50 us on its way, and cards send 25 Gbit/s; an engine reads new weights in 1 s, and starts again 1 to 2 s after
its death. Engines have no requests. benchmarks/lib/fleet/hosts.py says more.

With ``--relays`` one gateway leads a tree: see benchmarks/lib/fleet/relays.py.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.lib.fleet.hosted import HostedFleet, HostedGateway
from benchmarks.lib.fleet.hosts import Host, Network, run_on_hosts
from benchmarks.lib.report import plain_table
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m

HOLD = "benchmark"
IDLE_S = 3.0
SOCKET_US = 25.0
HEADER = ("engines", "gateways", "relays", "what", "s", "leader ms", "us/engine", "other ms", "relay ms", "engine us",
          "messages", "bytes")  # fmt: skip


class Used(NamedTuple):
    """CPU seconds, messages and bytes sent, of some hosts."""

    cpu_s: float
    messages: int
    sent_bytes: int

    @classmethod
    def of(cls, hosts: Sequence[Host]) -> Used:
        return cls(
            sum(host.cpu_s for host in hosts),
            sum(host.messages for host in hosts),
            sum(host.sent_bytes for host in hosts),
        )

    def since(self, before: Used) -> Used:
        return Used(self.cpu_s - before.cpu_s, self.messages - before.messages, self.sent_bytes - before.sent_bytes)


class Figures(NamedTuple):
    """The costs of one event. seconds: on the clock. leader_s: CPU of the gateway that leads at the end. others_s,
    relays_s, engines_s: mean CPU of one of the others, one relay, one engine. messages, sent_bytes: of all hosts."""

    seconds: float
    leader_s: float
    others_s: float
    relays_s: float
    engines_s: float
    messages: float
    sent_bytes: float

    def cells(self, num: int) -> list[str]:
        return [
            f"{self.seconds:.3f}",
            f"{1e3 * self.leader_s:.1f}",
            f"{1e6 * self.leader_s / num:.0f}",
            f"{1e3 * self.others_s:.1f}",
            f"{1e3 * self.relays_s:.1f}",
            f"{1e6 * self.engines_s:.0f}",
            f"{self.messages / num:.1f}",
            f"{self.sent_bytes / num:.0f}",
        ]


async def figures_of(fleet: HostedFleet, work: Awaitable[object]) -> Figures:
    """Await ``work``, and return what it took."""
    gateways, engines = [gateway.host for gateway in fleet.gateways], list(fleet.hosts.values())
    groups = [*([host] for host in gateways), fleet.relay_hosts, engines]
    gc.collect()
    before, began = [Used.of(group) for group in groups], asyncio.get_running_loop().time()
    await work
    seconds = asyncio.get_running_loop().time() - began
    used = [Used.of(group).since(then) for group, then in zip(groups, before, strict=True)]
    leader = gateways.index(fleet.leader.host)
    others = [used[i].cpu_s for i, host in enumerate(gateways) if i != leader and not host.is_dead]
    return Figures(
        seconds,
        used[leader].cpu_s,
        mean(others) if others else 0.0,
        used[-2].cpu_s / max(len(fleet.relay_hosts), 1),
        used[-1].cpu_s / len(engines),
        sum(one.messages for one in used),
        sum(one.sent_bytes for one in used),
    )


def median_of(rounds: Sequence[Figures]) -> Figures:
    return Figures(*map(median, zip(*rounds, strict=True)))


# ---------------------------------------------------------------------- what is measured


async def start(fleet: HostedFleet) -> None:
    fleet.start()
    await fleet.until(lambda: fleet.complete)


async def kill(fleet: HostedFleet, names: Sequence[str]) -> None:
    """Kill engines, and wait until every gateway has new ones as members."""
    boots = {name: fleet.engines[name].engine.boot_id for name in names}

    def all_back() -> bool:
        living = [gateway for gateway in fleet.gateways if not gateway.host.is_dead]
        welcomes = [gateway.client.membership.replicas[name].client.welcome for gateway in living for name in names]
        return fleet.complete and all(
            welcome is not None and welcome.boot_id != boots[name]
            for welcome, name in zip(welcomes, [*names] * len(living), strict=True)
        )

    fleet.kill(names)
    await fleet.until(all_back)


async def kill_leader(fleet: HostedFleet) -> None:
    """Kill the gateway that leads, and wait until another one does, with all members, and has made a call."""
    fleet.leader.kill()
    await fleet.until(lambda: any(gateway.leads for gateway in fleet.gateways) and fleet.complete)


async def session(gateway: HostedGateway, folder: str, parts: int) -> None:
    """Update the weights in a session of several calls."""
    begun = await gateway.call(m.BeginUpdateArgs())
    for _ in range(parts):
        await gateway.call(m.UpdatePartArgs(begun["session_id"], FolderSource(folder)))
    await gateway.call(m.CommitUpdateArgs(begun["session_id"]))


async def done(gateway: HostedGateway, args: m.Args) -> dict[str, Any]:
    """Make a call. Raises RuntimeError unless all replicas have done it."""
    report = await gateway.call(args)
    if not all(entry["status"] == "done" for entry in report["replicas"]):
        raise RuntimeError(f"not all replicas did it: {report['replicas']}")
    return report


async def calls(fleet: HostedFleet, rounds: int) -> AsyncIterator[tuple[str, Figures]]:
    """Start the fleet, and make calls. Yield the figures of each, the medians of ``rounds``."""
    yield "start", await figures_of(fleet, start(fleet))
    idle = await figures_of(fleet, asyncio.sleep(IDLE_S))
    yield "1 s idle", Figures(*(value / IDLE_S for value in idle))
    pairs: list[tuple[str, m.Args]] = [
        ("pause keep", m.PauseArgs("keep", hold_id=HOLD)),
        ("resume", m.ResumeArgs(HOLD)),
        ("pause abort", m.PauseArgs("abort", hold_id=HOLD)),
        ("resume again", m.ResumeArgs(HOLD)),
    ]
    found: dict[str, list[Figures]] = {what: [] for what, _ in pairs}
    for _ in range(rounds):
        for what, args in pairs:
            found[what].append(await figures_of(fleet, done(fleet.leader, args)))
    for what in found:
        if what != "resume again":
            yield what, median_of(found[what])
    yield "update", await figures_of(fleet, done(fleet.leader, m.UpdateWeightsArgs(source=FolderSource("/w1"))))


async def losses(fleet: HostedFleet) -> AsyncIterator[tuple[str, Figures]]:
    """Kill engines and gateways of a fleet that serves weights from a folder, and is held. Yield the figures of each
    loss."""
    yield "session", await figures_of(fleet, session(fleet.leader, "/w2", 1))
    await done(fleet.leader, m.PauseArgs("keep", hold_id=HOLD))
    yield "10 % killed", await figures_of(fleet, kill(fleet, fleet.names[::10]))
    yield "all killed", await figures_of(fleet, kill(fleet, fleet.names))
    await session(fleet.leader, "/w3", 2)  # of two parts, which nobody keeps
    yield "weights lost", await figures_of(fleet, kill(fleet, fleet.names))
    yield "republish", await figures_of(fleet, done(fleet.leader, m.UpdateWeightsArgs(source=FolderSource("/w4"))))
    if len(fleet.gateways) > 1:
        yield "leader killed", await figures_of(fleet, kill_leader(fleet))
    holds = {tuple(engine.engine.pause.holds) for engine in fleet.engines.values()}
    if holds != {(HOLD,)}:
        raise RuntimeError(f"engines have other holds than {HOLD!r}: {holds}")


async def measure(num: int, gateways: int, relays: int, network: Network, rounds: int) -> list[tuple[str, Figures]]:
    """Measure one fleet. Call it in virtual time. Garbage is collected between the events only: a collection would be
    counted for the host that runs."""
    fleet = HostedFleet(num, gateways, network, FleetConfig(fleet_id="benchmark"), relays)
    rows = []
    events = [calls(fleet, rounds)] if relays else [calls(fleet, rounds), losses(fleet)]
    for event in events:
        async for what, figures in event:
            print(f"{num} engines, {gateways} gateways, {relays} relays: {what}: {figures}", file=sys.stderr)
            rows.append((what, figures))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--relays", type=int, nargs="+", default=[0], help="of a tree; with one gateway only")
    parser.add_argument("--rounds", type=int, default=5, help="pauses of each kind")
    parser.add_argument("--socket-us", type=float, default=SOCKET_US, help="CPU of a socket for each message")
    args = parser.parse_args(argv)
    logging.getLogger("fastdeploy").setLevel(logging.CRITICAL)  # of each replica that is lost
    rows = []
    for num in args.engines:
        for relays in args.relays:
            for gateways in [1] if relays else args.gateways:
                network = Network(args.socket_us * 1e-6)
                gc.disable()
                found = run_on_hosts(measure(num, gateways, relays, network, args.rounds))
                gc.enable()
                for what, figures in found:
                    rows.append([str(num), str(gateways), str(relays), what, *figures.cells(num)])
    print(plain_table(HEADER, rows))
    return 0


if __name__ == "__main__":
    main()
