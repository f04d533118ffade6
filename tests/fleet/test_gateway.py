"""The gateway serves as one engine does: requests, and control calls over all replicas."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.server import until
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fleet.fake_fleet import FakeFleet, FakeGateway, fake_fleet
from support.fake_runner import expected_tokens


@pytest.fixture(scope="module")
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(3) as fleet:
        yield fleet


def test_requests_are_spread_and_answered(fleet):
    held = {"mode": "keep", "hold_id": "all-are-in-flight-at-once"}
    fleet.http.post("/v1/pause", json=held)
    body = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(fleet.http.post, "/v1/completions", json=body | {"prompt": [i, 7]}) for i in range(6)]
        until(lambda: sum(replica.in_flight for replica in fleet.client.membership.open) == 6, 20, "all are sent")
        assert [replica.in_flight for replica in fleet.client.membership.open] == [2, 2, 2]
        fleet.http.post("/v1/resume", json={"hold_id": held["hold_id"]})
        for i, reply in enumerate(asked):
            assert reply.result().json()["choices"][0]["token_ids"] == expected_tokens([i, 7], 5)


def test_an_adapter_that_no_replica_has_is_refused_at_once(fleet):
    reply = fleet.http.post("/v1/completions", json={"model": "nobody", "prompt": [1], "max_tokens": 5})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_a_pause_reaches_every_engine(fleet):
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).json()["result"]["status"]
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.http.post("/v1/resume").status_code == 200
    assert not any(engine.engine.pause.is_paused for engine in fleet.engines)


class BrokenLauncher(StaticLauncher):
    """Names one replica, and has an error afterwards."""

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield [Placement("r0", "ipc:///nowhere", "http://r0", "here")]
        raise RuntimeError("a bug")


async def broken() -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("task", ["launcher", "restart"])
def test_an_unexpected_error_in_any_task_ends_the_process_of_the_gateway(monkeypatch, task):
    ended, signals = threading.Event(), []
    monkeypatch.setattr(os, "kill", lambda pid, number: (signals.append((pid, number)), ended.set()))
    launcher = BrokenLauncher([]) if task == "launcher" else StaticLauncher([])
    gateway = FakeGateway(FleetConfig(fleet_id="fleet-1"), lambda: launcher)
    if task == "restart":
        gateway.loop.call_soon_threadsafe(lambda: gateway.client.membership._spawn(broken()))
    assert ended.wait(20) and signals == [(os.getpid(), signal.SIGTERM)]
    gateway.end_gateway()
