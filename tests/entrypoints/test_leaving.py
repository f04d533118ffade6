"""A gateway that was replaced ends what it has begun, and leaves the fleet to the other gateways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from e2e.server import in_background, until
from fastdeploy.entrypoints import leaving
from fastdeploy.entrypoints.leaving import leave
from fleet.fake_fleet import FakeGateway
from fleet.gateways import Gateways, gateways
from support.fake_runner import expected_tokens

BODY = {"prompt": [7], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True, "stream": True}


@pytest.fixture
def fleet() -> Iterator[Gateways]:
    with gateways(2, runner={"step_s": 0.02, "num_blocks": 256}) as fleet:
        yield fleet


def begin(gateway: FakeGateway) -> None:
    """Tell a gateway to leave, and return when it takes no connections."""
    asyncio.run_coroutine_threadsafe(leave(gateway._uvicorn, gateway.client), gateway.loop)
    until(lambda: refuses(gateway.url), 20, "no connection is taken")


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False


def ends(gateway: FakeGateway) -> bool:
    return not gateway._gateway.is_alive()


def test_streams_run_to_their_end_and_another_gateway_leads(fleet):
    old, other = fleet.leader, fleet.follower
    assert old.http.get("/health").status_code == 200  # over a connection that is kept
    with httpx.stream("POST", f"{old.url}/v1/completions", json=BODY) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        tokens = json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        begin(old)
        reply = old.http.get("/health")
        assert (reply.status_code, reply.headers["connection"]) == (200, "close"), (
            "the next connection is another one's"
        )
        for line in lines:
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    assert tokens == expected_tokens([7], 100)
    until(lambda: ends(old), 20, "its end")
    until(lambda: other.client.membership.leadership.leads, 20, "another gateway leads")
    assert other.http.post("/v1/pause", json={"mode": "keep", "hold_id": "h"}).status_code == 200
    until(lambda: fleet.holds() == [["h"]] * 2, 20, "the hold on all, also on one that joins after the call")


def test_a_gateway_that_leads_stays_until_the_weight_session_has_ended(fleet, monkeypatch):
    monkeypatch.setattr(leaving, "IDLE_S", 0.1)
    monkeypatch.setattr(leaving, "LOOK_S", 0.01)
    old, other = fleet.leader, fleet.follower
    session = other.http.post("/v1/weights/begin", json={"version": "w1"}).json()["result"]["session_id"]
    begin(old)
    until(lambda: not old._uvicorn.server_state.connections, 20, "no client is connected")
    replies = [in_background(other.http.post, "/v1/pause", json={"mode": "keep"}) for _ in range(3)]
    assert all(reply.result(20).status_code == 200 for reply in replies), "calls are made meanwhile"
    assert old.client.membership.leadership.leads
    assert other.http.post("/v1/weights/abort", json={"session_id": session}).status_code == 200
    until(lambda: ends(old), 20, "its end")
    until(lambda: other.client.membership.leadership.leads, 20, "another gateway leads")
    assert other.http.post("/v1/resume").status_code == 200
