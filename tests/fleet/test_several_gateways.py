"""Several gateways on the same engines: one leads, the others follow it, and all answer alike."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from e2e.server import until
from fastdeploy.inter_communicator import messages as m
from fleet.gateways import QUICK, GatewayProcess, Gateways, gateway_processes, gateways
from support.fake_runner import expected_tokens

BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 5, "prompt": [3, 4]}


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateways]:
    with gateways(2) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: Gateways) -> Gateways:
    for door in shared.doors:
        door.wait_members(2)
    return shared


def test_every_gateway_answers_requests(fleet):
    for door in fleet.doors:
        reply = door.http.post("/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["token_ids"] == expected_tokens([3, 4], 5), reply.text
        assert door.http.get("/health").status_code == 200


def test_every_gateway_lists_the_replicas_as_the_one_that_leads_knows_them(fleet):
    for door in (fleet.leader, fleet.follower):
        for entry in door.http.get("/v1/replicas").json()["replicas"]:
            assert entry["load"]["max_num_seqs"] and entry["in_flight"] == 0, entry


def test_a_control_call_at_a_gateway_that_follows_is_made_by_the_one_that_leads(fleet):
    report = fleet.follower.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"})
    assert report.status_code == 200, report.text
    assert {entry["status"] for entry in report.json()["result"]["replicas"]} == {"done"}
    assert fleet.holds() == [["trainer"]] * 2
    assert set(fleet.leader.client.membership.state.holds) == {("engine", "trainer")}
    for door in fleet.doors:
        assert door.http.get("/v1/is_paused").json()["result"]["is_paused"]
    refusal = fleet.follower.http.post("/v1/renew", json={"hold_id": "nobody", "ttl_s": 5})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (404, "hold_not_found"), refusal.text
    assert fleet.leader.http.post("/v1/resume", json={"hold_id": "trainer"}).status_code == 200
    assert fleet.holds() == [[], []]


def test_a_call_waits_while_the_replicas_come_back(fleet):
    pause = lambda door: door.http.post("/v1/pause", json={"mode": "keep", "hold_id": door.url})  # noqa: E731
    with ThreadPoolExecutor() as threads:
        for engine in fleet.engines:
            engine.kill()
        for door in fleet.doors:
            until(lambda door=door: not door.client.membership.quorum, 20, "the replicas are lost")
        pauses = [threads.submit(pause, door) for door in fleet.doors]
        wait(pauses, 0.5)  # one that does not wait is answered by then
        for engine in fleet.engines:
            engine.start()
        assert [answer.result().text for answer in pauses if answer.result().status_code != 200] == []
        for door in fleet.doors:
            assert door.http.post("/v1/resume", json={"hold_id": door.url}).status_code == 200


def test_a_call_waits_on_if_the_members_are_gone_again_when_it_may_begin(fleet):
    client = fleet.leader.client

    async def waits() -> bool:
        led = client.leader_calls.led
        led.set(False)
        call = asyncio.create_task(client.call(m.ResetCacheArgs()))
        await asyncio.sleep(0.05)
        led.set(True)  # as at the begin of a leadership, while one member after the other is to join again
        led.set(False)
        await asyncio.sleep(0.05)
        waits = not call.done()
        led.set(True)
        await call
        return waits

    assert fleet.leader.run(waits())


@pytest.mark.slow
def test_when_the_process_that_leads_dies_a_living_one_leads_and_nothing_is_lost():
    with gateway_processes(2, 2, runner={"step_s": 0.02}) as fleet:
        first, (second,) = fleet.leader, fleet.followers
        assert first.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"}).status_code == 200
        assert first.http.post("/v1/resume", json={"hold_id": "trainer"}).status_code == 200
        tokens = []
        begun = threading.Event()

        def stream() -> None:
            for more in streamed(second, {**BODY, "max_tokens": 60, "stream": True}):
                tokens.extend(more)
                begun.set()

        reader = threading.Thread(target=stream)
        reader.start()
        assert begun.wait(20)
        assert second.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"}).status_code == 200
        assert fleet.holds() == [["trainer"]] * 2
        first.kill()
        reply = httpx.post(second.url + "/v1/resume", json={"hold_id": "trainer"}, timeout=30)
        assert reply.status_code == 200 and reply.json()["result"]["released"] == ["trainer"], reply.text
        assert fleet.holds() == [[], []]
        reader.join(30)
        assert tokens == expected_tokens([3, 4], 60)
        assert fleet.leader is second
        first.start()
        fleet.wait(lambda: first.members() == 2, "the killed one follows")
        assert first.http.post("/v1/pause", json={"mode": "keep", "hold_id": "again"}).status_code == 200
        assert fleet.holds() == [["again"]] * 2


@pytest.mark.slow
def test_a_stream_of_a_gateway_that_dies_is_taken_up_at_another_one_from_its_first_token():
    body = {**BODY, "max_tokens": 60, "stream": True, "request_id": "kept", "retain_s": 60}
    with gateway_processes(2, 2, runner={"step_s": 0.05}) as fleet:
        dies, (lives,) = fleet.leader, fleet.followers
        seen = []
        with pytest.raises(httpx.TransportError):
            for tokens in streamed(dies, body):
                seen.extend(tokens)
                if len(seen) > 3:
                    dies.kill()
        assert 3 < len(seen) < 60
        assert [token for tokens in streamed(lives, body) for token in tokens] == expected_tokens([3, 4], 60)


@pytest.mark.slow
def test_when_the_gateway_that_leads_hangs_another_one_leads_and_it_follows_afterwards():
    with gateway_processes(2, 2) as fleet:
        first, (second,) = fleet.leader, fleet.followers
        first.signal(signal.SIGSTOP)
        # The call that reached the one that hangs fails: nobody knows whether it was made.
        pause = lambda: second.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"})  # noqa: E731
        until(lambda: pause().status_code == 200, 20, "another one leads")
        assert fleet.leader is second
        first.signal(signal.SIGCONT)
        fleet.wait(lambda: first.members() == 2, "the other one follows")
        until(lambda: first.http.post("/v1/resume", json={"hold_id": "trainer"}).status_code == 200, 20, "forwarded")
        assert fleet.holds() == [[], []]


def streamed(door: GatewayProcess, body: dict[str, Any]) -> Iterator[list[int]]:
    """Yield the tokens of each event of a stream."""
    with door.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]["token_ids"] or []


@pytest.mark.slow
def test_calls_and_requests_that_come_while_nobody_leads_are_answered_by_the_next_leader():
    with gateways(2, config=replace(QUICK, lease_s=3.0, stall_s=1.0)) as fleet:
        stopped, lives = fleet.leader, fleet.follower
        with stopped.stopped_gateway(), ThreadPoolExecutor() as threads:
            pause = lambda hold: lives.http.post("/v1/pause", json={"mode": "keep", "hold_id": hold})  # noqa: E731
            assert "lost during the call" in pause("lost").json()["error"]["message"]  # it may have been made
            pauses = [threads.submit(pause, hold) for hold in "abcd"]
            request = threads.submit(lives.http.post, "/v1/completions", json=BODY)
            assert [answer.result().text for answer in pauses if answer.result().status_code != 200] == []
            for hold in "abcd":
                assert lives.http.post("/v1/resume", json={"hold_id": hold}).status_code == 200
            lives.http.post("/v1/resume", json={"hold_id": "lost"})
            assert request.result().json()["choices"][0]["token_ids"] == expected_tokens([3, 4], 5)
