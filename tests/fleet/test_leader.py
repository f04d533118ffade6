"""One gateway leads the engines. Another one takes its place, with the holds and the weights that stand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.server import until
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import NotLeader
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.join import Joiner
from fastdeploy.fleet.launcher import StaticLauncher
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator.messages import LeadArgs, PauseArgs, ResumeArgs
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fleet.fake_fleet import FakeEngine, FakeFleet, FakeGateway, fake_fleet
from support.fake_runner import expected_tokens

CONFIG = FleetConfig(fleet_id="fleet-1", lease_s=0.6, rebuild_s=30.0)  # a call waits for as long as both
BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 5, "prompt": [3, 4]}


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2, config=CONFIG) as fleet:
        yield fleet


@contextlib.contextmanager
def second(fleet: FakeFleet, config: FleetConfig = CONFIG) -> Iterator[FakeGateway]:
    gateway = FakeGateway(config, lambda: StaticLauncher([engine.placement for engine in fleet.engines]))
    try:
        yield gateway
    finally:
        gateway.end_gateway()


def holds(fleet: FakeFleet) -> list[list[str]]:
    return [list(engine.engine.pause.holds) for engine in fleet.engines]


def pause(target: Any, **fields: Any) -> Any:
    return target.http.post("/v1/pause", json={"mode": "keep", **fields})


def test_the_holds_of_a_gateway_that_died_stand(fleet):
    assert pause(fleet, hold_id="trainer").status_code == 200
    boot_id = fleet.client.membership.boot_id
    fleet.replace_gateway()
    fleet.wait_members(2)
    assert holds(fleet) == [["trainer"], ["trainer"]]
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.client.membership.boot_id == boot_id
    assert set(fleet.client.membership.state.holds) == {("engine", "trainer")}
    assert fleet.http.post("/v1/resume", json={"hold_id": "trainer"}).json()["result"]["released"] == ["trainer"]
    assert fleet.http.post("/v1/completions", json=BODY).json()["choices"][0]["token_ids"] == expected_tokens([3, 4], 5)


@pytest.mark.slow
def test_a_hold_that_reached_one_engine_only_stands_on_all_after_a_takeover(fleet):
    boot_id = fleet.client.membership.boot_id
    fleet.end_gateway()
    until(lambda: leads(fleet.engines[0], LeadArgs(boot_id, "dead", 9, 0.1)), 20, "the gateway's lease has ended")
    renewed = LeadArgs(boot_id, "dead", 9, 0.1)  # for a connection of its own
    fleet.engines[0].call(renewed, PauseArgs(mode="keep", hold_id="half"))
    fleet.start_gateway()
    fleet.wait_members(2)
    assert holds(fleet) == [["half"], ["half"]]


@pytest.mark.slow
def test_the_ttl_of_a_hold_runs_on_under_the_next_gateway(fleet):
    assert pause(fleet, hold_id="trainer", ttl_s=1.5).status_code == 200
    fleet.replace_gateway()
    fleet.wait_members(2)
    until(lambda: holds(fleet) == [[], []], 20, "the hold ended")
    assert fleet.client.membership.state.holds == {}


def test_a_second_gateway_waits_and_changes_nothing():
    long, short = (FleetConfig(fleet_id="fleet-1", lease_s=s, rebuild_s=s) for s in (60.0, 0.1))
    with fake_fleet(2, config=long) as fleet, second(fleet, short) as other:
        term = fleet.client.membership.leadership.term
        leadership = other.client.membership.leadership
        until(lambda: "lease" in leadership.why, 20, "refused by the engines")
        for path in ("/v1/pause", "/v1/resume"):
            refusal = other.http.post(path, json={"mode": "keep"} if path == "/v1/pause" else {})
            assert refusal.status_code in (409, 503), refusal.text
        assert holds(fleet) == [[], []]
        assert pause(fleet).status_code == 200
        assert other.http.get("/v1/is_paused").json()["result"]["is_paused"], "reads are answered"
        for path in ("/v1/weights", "/metrics"):
            assert other.http.get(path).status_code == 200, path
        for path in ("/health", "/ready"):
            reply = other.http.get(path)
            assert reply.status_code == 503 and "lease" in reply.json()["reason"], reply.text
        assert (leadership.leads, fleet.client.membership.leadership.term) == (False, term)


@pytest.mark.parametrize("joins", [True, False], ids=["before it leads", "before its first member"])
def test_a_call_to_a_gateway_that_starts_waits_for_the_first_member(fleet, monkeypatch, joins):
    assert pause(fleet, hold_id="trainer").status_code == 200
    if not joins:
        begins, bring = threading.Event(), Joiner.bring

        async def slow(joiner: Joiner, replica: Replica) -> None:
            await asyncio.to_thread(begins.wait)
            await bring(joiner, replica)

        monkeypatch.setattr(Joiner, "bring", slow)
    fleet.replace_gateway()
    if not joins:
        until(lambda: fleet.client.membership.leadership.leads, 20, "it leads")
        assert not fleet.client.membership.quorum
        fleet.loop.call_soon_threadsafe(lambda: fleet.loop.call_soon(begins.set))
    reply = fleet.http.post("/v1/resume", json={"hold_id": "trainer"})
    assert reply.status_code == 200 and reply.json()["result"]["released"] == ["trainer"], reply.text
    fleet.wait_members(2)
    assert holds(fleet) == [[], []]


async def test_a_replica_that_still_follows_an_earlier_gateway_joins_when_that_lease_ends(fleet):
    boot_id = fleet.client.membership.boot_id
    await asyncio.to_thread(fleet.end_gateway)
    first, second = fleet.engines
    newest = LeadArgs(boot_id, "newest", 9, 0.001)  # the next gateway asks the engine with the highest term first
    await asyncio.to_thread(until, lambda: leads(first, newest), 20, "the first engine is free")
    await asyncio.to_thread(until, lambda: leads(second, LeadArgs(boot_id, "a", 7, 0.001)), 20, "the second one, too")
    earlier = EngineClient(ZmqConnector(second.endpoint))
    earlier.start()
    try:
        await earlier.call(LeadArgs(boot_id, "earlier", 8, 1.0))
        await asyncio.to_thread(fleet.start_gateway)
        await asyncio.to_thread(fleet.wait_members, 2)  # in less time than rebuild_s
    finally:
        await earlier.close()


def test_calls_that_waited_are_sent_in_their_order(fleet):
    fleet.replace_gateway()

    async def all_of_them() -> None:
        await asyncio.gather(*(fleet.client.call(PauseArgs(mode="keep", hold_id=name)) for name in "abc"))

    fleet.run(all_of_them())
    fleet.wait_members(2)
    assert holds(fleet) == [["a", "b", "c"]] * 2


def test_a_call_to_a_gateway_that_finds_no_engine_ends_as_unavailable():
    config = FleetConfig(fleet_id="fleet-1", lease_s=0.2, rebuild_s=0.1)
    gateway = FakeGateway(config, lambda: StaticLauncher([]))
    try:
        reply = pause(gateway)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead") and reply.headers[
            "Retry-After"
        ]
    finally:
        gateway.end_gateway()


def test_a_gateway_that_was_deposed_before_its_first_member_refuses_at_once(fleet, monkeypatch):
    async def never(joiner: Joiner, replica: Replica) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Joiner, "bring", never)
    fleet.replace_gateway()
    leadership = fleet.client.membership.leadership
    until(lambda: leadership.leads, 20, "it leads")

    async def depose_and_call() -> None:
        leadership.depose("another gateway leads")
        await fleet.client.call(ResumeArgs())

    with pytest.raises(NotLeader, match="another gateway leads"):
        fleet.run(depose_and_call())


@pytest.mark.slow
def test_a_second_gateway_leads_when_the_first_one_has_gone(fleet):
    assert pause(fleet, hold_id="trainer").status_code == 200
    with second(fleet) as other:
        until(lambda: "lease" in other.client.membership.leadership.why, 20, "refused by the engines")
        term = fleet.client.membership.leadership.term
        fleet.end_gateway()
        other.wait_members(2)
        assert other.client.membership.leadership.term > term
        assert set(other.client.membership.state.holds) == {("engine", "trainer")}
        fleet.start_gateway()


def test_a_gateway_that_stood_still_steps_down_when_another_one_has_led(fleet, monkeypatch):
    leadership, engine = fleet.client.membership.leadership, fleet.engines[0]
    boot_id, term = leadership.fleet, leadership.term
    usurp, take, may_take = LeadArgs(boot_id, "usurper", term + 5, 0.001), leadership._become_leader, threading.Event()

    async def take_later() -> list[dict[str, Any]]:
        await asyncio.to_thread(may_take.wait)
        return await take()

    monkeypatch.setattr(leadership, "_become_leader", take_later)
    with fleet.stopped_gateway():
        until(lambda: leads(engine, usurp), 20, "the lease of the gateway has ended")
    until(lambda: not leadership.leads, 20, "stepped down")
    refusal = pause(fleet)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (409, "not_leader")
    assert holds(fleet) == [[], []]
    may_take.set()
    until(lambda: leadership.leads, 20, "leads again, since the other one is gone")
    fleet.wait_members(2)
    assert leadership.term > term + 5
    assert pause(fleet).status_code == 200


def leads(engine: FakeEngine, args: LeadArgs) -> bool:
    try:
        engine.call(args)
    except NotLeader:
        return False
    return True
