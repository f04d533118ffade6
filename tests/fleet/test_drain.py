"""Replicas are drained, removed and added while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from e2e.server import in_background, until
from fastdeploy.core.errors import ReplicaNotFound
from fastdeploy.fleet.replica import ReplicaState
from fleet.fake_fleet import FakeFleet, fake_fleet
from support.fake_runner import expected_tokens

BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 30}


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2, restarts=True, runner={"step_s": 0.01}) as fleet:
        yield fleet


def under_load(fleet: FakeFleet, num: int) -> list:
    """Begin ``num`` requests, and return once both replicas have some."""
    replicas = fleet.client.membership.replicas.values()
    return begin(fleet, [[i] for i in range(num)], lambda: all(r.in_flight for r in replicas), "both have requests")


def begin(fleet: FakeFleet, prompts: list[list[int]], condition: Callable[[], object], what: str) -> list:
    """Send a request for each prompt. None of them ends before ``condition`` was true."""
    fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "none-ends"})
    replies = [in_background(fleet.http.post, "/v1/completions", json=BODY | {"prompt": p}) for p in prompts]
    until(condition, 20, what)
    fleet.http.post("/v1/resume", json={"hold_id": "none-ends"})
    return replies


def check(replies: list) -> None:
    for i, reply in enumerate(replies):
        choice = reply.result(20).json()["choices"][0]
        assert choice["token_ids"] == expected_tokens([i], BODY["max_tokens"])


def test_a_drained_replica_ends_its_requests_and_gets_no_new_ones(fleet):
    membership, replica, other = fleet.client.membership, fleet.replica("replica-0"), fleet.replica("replica-1")
    replies = under_load(fleet, 6)
    fleet.run(membership.drain("replica-0"))
    assert (replica.state, replica.in_flight) == (ReplicaState.DRAINING, 0)
    prompts = [[i] for i in range(4)]
    later = begin(fleet, prompts, lambda: other.in_flight >= 4, "the new requests are at the other replica")
    assert replica.in_flight == 0
    check(replies)
    check(later)


def test_a_fleet_whose_replicas_are_all_drained_lets_a_bounded_number_wait_and_is_not_ready():
    with fake_fleet(2, max_waiting=2) as fleet:
        assert fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "h"}).status_code == 200
        assert fleet.http.get("/ready").status_code == 200, "a router must not evict a server that only holds requests"
        assert fleet.http.post("/v1/resume", json={"hold_id": "h"}).status_code == 200
        membership, names = fleet.client.membership, ["replica-0", "replica-1"]
        for name in names:
            fleet.run(membership.drain(name))
        ready = fleet.http.get("/ready")
        assert ready.status_code == 503 and "drained" in ready.json()["reason"] and ready.headers["retry-after"]
        replies = [in_background(fleet.http.post, "/v1/completions", json=BODY | {"prompt": [i]}) for i in range(9)]
        until(lambda: sum(reply.done() for reply in replies) == 5, 20, "those beyond the limit are refused")
        refused = [reply.result() for reply in replies if reply.done()]
        assert {(r.status_code, r.json()["error"]["code"]) for r in refused} == {(429, "queue_full")}
        assert all(r.headers["retry-after"] for r in refused)
        fleet.loop.call_soon_threadsafe(lambda: [membership.undrain(name) for name in names])
        assert sorted(reply.result(20).status_code for reply in replies) == [200] * 4 + [429] * 5
        assert fleet.http.get("/ready").status_code == 200


@pytest.mark.slow
def test_a_drained_replica_takes_part_in_pauses_and_may_come_back(fleet):
    membership = fleet.client.membership
    fleet.run(membership.drain("replica-0"))
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.http.post("/v1/resume").status_code == 200
    fleet.loop.call_soon_threadsafe(membership.undrain, "replica-0")
    until(lambda: fleet.replica("replica-0").state is ReplicaState.MEMBER, 20, "a member again")
    check(under_load(fleet, 4))


@pytest.mark.slow
def test_a_drained_replica_stays_drained_when_it_is_restarted(fleet):
    fleet.run(fleet.client.membership.drain("replica-0"))
    fleet.launcher.revive("replica-0")
    replica, engine = fleet.replica("replica-0"), fleet.engines[0].engine
    until(lambda: (w := replica.client.welcome) is not None and w.boot_id == engine.boot_id, 20, "connected again")
    until(lambda: replica.in_quorum, 20, "joined again")
    assert replica.state is ReplicaState.DRAINING


@pytest.mark.slow
def test_a_removed_replica_ends_its_requests_first(fleet):
    replies = under_load(fleet, 6)
    fleet.run(fleet.client.membership.remove("replica-0"))
    assert list(fleet.client.membership.replicas) == ["replica-1"]
    assert [engine.name for engine in fleet.engines] == ["replica-1"]
    check(replies)
    with pytest.raises(ReplicaNotFound, match="replica-0"):
        fleet.run(fleet.client.membership.drain("replica-0"))


def test_a_replica_that_is_added_under_load_joins_and_gets_requests(fleet):
    replies = under_load(fleet, 6)
    name = fleet.run(fleet.client.membership.add())
    until(lambda: name in fleet.client.membership.replicas, 20, "listed")
    until(lambda: fleet.replica(name).state is ReplicaState.MEMBER, 20, "a member")
    prompts = [[i, i] for i in range(6)]
    later = begin(fleet, prompts, lambda: fleet.replica(name).in_flight, "a request at the new replica")
    check(replies)
    for i, reply in enumerate(later):
        assert reply.result(20).json()["choices"][0]["token_ids"] == expected_tokens([i, i], BODY["max_tokens"])


@pytest.mark.slow
def test_a_removal_does_not_wait_longer_than_it_may(fleet):
    replies = under_load(fleet, 4)
    for engine in fleet.engines[:1]:
        engine.stop()
    fleet.run(fleet.client.membership.remove("replica-0", drain_s=0.05))
    assert list(fleet.client.membership.replicas) == ["replica-1"]
    check(replies)  # those of the removed replica went on at the other one


@pytest.mark.slow
def test_the_end_of_a_drain_needs_no_request(fleet):
    async def drain() -> None:
        async with asyncio.timeout(30):
            await fleet.client.membership.drain("replica-1")

    fleet.run(drain())
    assert fleet.replica("replica-1").state is ReplicaState.DRAINING
