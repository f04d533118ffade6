"""benchmarks/fleet_scale.py: hosts in virtual time, and fleets of gateways, relays and engines on them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import fleet_scale
from benchmarks.lib.fleet.hosted import HostedFleet
from benchmarks.lib.fleet.hosts import Host, Network, run_on_hosts
from fastdeploy.core.errors import FastDeployError
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m

NUM = 8


def test_the_work_of_one_host_delays_itself_and_no_other():
    async def run() -> list[tuple[str, int]]:
        loop, a, b = asyncio.get_running_loop(), Host("a"), Host("b")
        ends = []

        def work(name: str) -> None:
            loop.charge(10.0)
            ends.append((name, round(loop.time())))

        for host in (a, a, b):
            with host.here():
                loop.call_soon(work, host.name)
        await asyncio.sleep(100.0)
        assert (round(a.cpu_s), round(b.cpu_s)) == (20, 10)
        return ends

    assert run_on_hosts(run()) == [("a", 10), ("b", 10), ("a", 20)]


def test_a_message_takes_the_socket_at_both_ends_the_card_and_its_way():
    async def run() -> float:
        loop, a, b, came = asyncio.get_running_loop(), Host("a"), Host("b"), asyncio.Event()
        with a.here():
            send = Network(socket_s=1.0, delay_s=10.0, bytes_per_s=1.0).send
            loop.call_soon(send, b, 100, came.set)
        await came.wait()
        assert a.messages == 1 and a.sent_bytes == 100 and min(a.cpu_s, b.cpu_s) >= 1.0
        return loop.time()

    assert run_on_hosts(run()) == pytest.approx(1.0 + 100.0 + 10.0 + 1.0, abs=0.5)


def holds(fleet: HostedFleet) -> list[list[str]]:
    return [sorted(engine.engine.pause.holds) for engine in fleet.engines.values()]


def test_three_gateways_pause_all_engines_or_none_and_all_come_back_with_the_hold():
    async def run() -> None:
        fleet = HostedFleet(NUM, 3, Network(), FleetConfig(fleet_id="test"))
        await fleet_scale.start(fleet)
        follower = next(gateway for gateway in fleet.gateways if not gateway.leads)
        report = await fleet_scale.done(follower, m.PauseArgs("keep", hold_id="a"))
        assert len(report["replicas"]) == NUM and holds(fleet) == [["a"]] * NUM
        for bad in (m.PauseArgs("keep", hold_id="b", ttl_s=-1.0), m.PauseArgs("no such mode", hold_id="b")):
            with pytest.raises(FastDeployError):
                await follower.call(bad)
        assert holds(fleet) == [["a"]] * NUM
        await fleet_scale.kill(fleet, fleet.names)
        assert holds(fleet) == [["a"]] * NUM
        await fleet_scale.kill_leader(fleet)
        await fleet_scale.done(fleet.leader, m.ResumeArgs("a"))
        assert holds(fleet) == [[]] * NUM

    run_on_hosts(run())


@pytest.mark.slow
def test_a_tree_makes_the_calls_on_all_engines():
    async def run() -> None:
        fleet = HostedFleet(NUM, 1, Network(), FleetConfig(fleet_id="test"), relays=3)
        async for _, figures in fleet_scale.calls(fleet, rounds=1):
            assert figures.seconds > 0 and figures.relays_s > 0
        await fleet_scale.done(fleet.leader, m.PauseArgs("keep", hold_id="a"))
        assert holds(fleet) == [["a"]] * NUM
        assert {engine.engine.scopes.base.served.weight_epoch for engine in fleet.engines.values()} == {1}

    run_on_hosts(run())


@pytest.mark.slow
def test_the_program_prints_a_row_for_each_event(capsys: pytest.CaptureFixture[str]):
    assert fleet_scale.main(["--engines", "3", "--gateways", "2", "--rounds", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 12 and all(row.split()[:3] == ["3", "2", "0"] for row in rows)
