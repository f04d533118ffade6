"""The choice of a replica for a request, and the replicas that are avoided. Session 0 is a session too."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import RolloutFailed
from rl.fake_server import CHECKPOINT, FakeServer, Fault, fleet

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 4, "seed": 1, "ignore_eos": True}


@pytest.mark.parametrize("session", [0, 1, "", "a", False])
async def test_every_session_stays_on_its_replica_whatever_its_name(session):
    async with fleet(3) as (servers, client):
        home = (await client.generate(PROMPT, PARAMS, session_id=session)).replicas
        # Load the session's replica: without the session, the other one would be chosen.
        busy = next(r for r in client.replicas if r.url == home[0])
        busy.in_flight += 5
        for _ in range(4):
            assert (await client.generate(PROMPT, PARAMS, session_id=session)).replicas == home
        assert (await client.generate(PROMPT, PARAMS)).replicas != home
        assert sum(bool(s.requests) for s in servers) == 2


async def test_servers_are_told_the_session():
    async with fleet(1) as ([server], client):
        for session in (0, "a", ("task", 1), None):
            await client.generate(PROMPT, PARAMS, session_id=session)
        told = [body.get("session") for body in server.requests]
        assert told[:2] == ["0", "a"] and len(told[2]) == 64 and told[3] is None


async def test_without_a_session_the_least_loaded_replica_is_chosen():
    async with fleet(3) as (servers, client):
        for server in servers:
            server.faults.extend([Fault("hang", 1)] * 2)
        tasks = [asyncio.create_task(client.generate(PROMPT, PARAMS)) for _ in range(6)]
        while sum(s.streams for s in servers) < 6:
            await asyncio.sleep(0.01)
        assert [s.streams for s in servers] == [2, 2, 2]
        assert [r.in_flight for r in client.replicas] == [2, 2, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [r.in_flight for r in client.replicas] == [0, 0, 0]


async def test_a_dead_replica_is_avoided_and_its_sessions_move_permanently():
    async with fleet(2) as (servers, client):
        home = (await client.generate(PROMPT, PARAMS, session_id=0)).replicas[0]
        gone = next(s for s in servers if s.url == home)
        other = next(s for s in servers if s.url != home)
        gone.down = True
        gone.drop_all()
        moved = await client.generate(PROMPT, PARAMS, session_id=0)
        assert moved.replicas[-1] == other.url and len(moved.token_ids) == 4
        for _ in range(10):
            await client.generate(PROMPT, PARAMS)
        gone.down = False
        next(r for r in client.replicas if r.url == home).retry_at = 0.0  # the time to avoid the replica is over
        assert (await client.generate(PROMPT, PARAMS, session_id=0)).replicas == (other.url,)


async def test_a_broken_stream_continues_on_another_replica_from_its_last_token():
    async with fleet(2) as (servers, client):
        alone = await client.generate(PROMPT, PARAMS)
        for server in servers:
            server.faults.append(Fault("drop", 2))
            server.requests.clear()
        joined = await client.generate(PROMPT, PARAMS)
        assert joined.token_ids == alone.token_ids and joined.logprobs == alone.logprobs
        assert joined.num_resumes == 1 and set(joined.replicas) == {s.url for s in servers}
        assert [(s.start, s.end) for s in joined.spans] == [(0, 2), (2, 4)]


async def test_a_replica_that_rejects_is_asked_again_after_retry_after_and_keeps_its_session():
    async with fleet(2) as (servers, client):
        home = (await client.generate(PROMPT, PARAMS, session_id=0)).replicas[0]
        server = next(s for s in servers if s.url == home)
        server.faults.append(Fault("reject"))
        assert (await client.generate(PROMPT, PARAMS, session_id=0)).replicas[-1] != home
        await asyncio.sleep(0.05)
        assert (await client.generate(PROMPT, PARAMS, session_id=0)).replicas == (home,)


async def test_rejections_do_not_count_as_failures_and_a_resume_ends_the_wait():
    async with FakeServer(*[Fault("reject")] * 30) as server, RolloutClient(server.url, max_failures=2) as client:
        assert len((await client.generate(PROMPT, PARAMS)).token_ids) == 4
        assert len(server.requests) == 31
        client.replicas[0].mark_busy(asyncio.get_running_loop().time(), 3600.0)
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        await asyncio.sleep(0.05)
        assert not task.done() and len(server.requests) == 31
        await client.resume()
        assert len((await task).token_ids) == 4


async def test_without_any_live_replica_the_request_ends_at_its_deadline():
    async with FakeServer() as server, RolloutClient(server.url) as client:
        server.down = True
        with pytest.raises(RolloutFailed) as failed:
            await client.generate(PROMPT, PARAMS, timeout_s=0.3)
        assert failed.value.partial[0].token_ids == []


async def test_tokens_of_an_engine_that_restarted_without_the_published_weights_are_not_used():
    """The client detects the restart by the boot id in the chunks; no connection breaks."""
    async with fleet(2) as (servers, client):
        await client.update_weights(CHECKPOINT, version="one")
        lost = servers[0]
        for server in servers:
            server.faults.append(Fault("abort", 2))
        lost.boot_id, lost.weight_epoch, lost.version = "boot-2", 0, "0"
        got = await asyncio.gather(*(client.generate(PROMPT, PARAMS) for _ in range(4)))
        assert {s.version for r in got for s in r.spans} == {"one"}
        assert all(len(r.token_ids) == 4 for r in got)
        health = await client.health()
        assert health[0].result["stale"] and not health[1].result["stale"]
        await client.update_weights(CHECKPOINT, version="two")
        assert {r.result["stale"] for r in await client.health()} == {None}
        again = await asyncio.gather(*(client.generate(PROMPT, PARAMS) for _ in range(4)))
        assert {r.replicas[-1] for r in again} == {s.url for s in servers}


async def test_a_frozen_stream_whose_engine_restarted_continues_on_another_replica():
    """On the new engine the request would wait for the next publication."""
    async with fleet(2) as (servers, client):
        await client.update_weights(CHECKPOINT)
        for server in servers:
            server.faults.append(Fault("hang", 2))
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, session_id=5))
        while not any(s.streams for s in servers):
            await asyncio.sleep(0.01)
        frozen = next(s for s in servers if s.streams)
        other = next(s for s in servers if s is not frozen)
        other.faults.clear()
        frozen.boot_id = "boot-2"
        assert (await task).replicas == (frozen.url, other.url)
