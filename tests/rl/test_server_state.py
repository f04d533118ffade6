"""When requests are sent: not to a server that failed, rejects requests, or lost the published weights."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.core.errors import InvalidField, QueueFull
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import RolloutFailed
from rl.fake_server import CHECKPOINT, Fault, fake_site

PROMPT = [11, 12, 13]
PARAMS = {"max_tokens": 4, "seed": 1, "ignore_eos": True}


@pytest.mark.parametrize("url", [["http://a"], ["http://a", "http://b"], ("http://a",), None])
def test_several_addresses_are_refused_with_the_command_that_makes_one_of_them(url):
    with pytest.raises(InvalidField, match="^url: expected one address .* `fastdeploy fleet MODEL --replica tcp://"):
        RolloutClient(url)
    with pytest.raises(InvalidField, match="^control_url: expected one address"):
        RolloutClient("http://a", control_url=["http://b", "http://c"])


async def test_the_server_gets_the_session():
    async with fake_site() as (server, client):
        for session in (0, "a", ("task", 1), None):
            await client.generate(PROMPT, PARAMS, session_id=session)
        sent = [body.get("session") for body in server.requests]
        assert sent[:2] == ["0", "a"] and len(sent[2]) == 64 and sent[3] is None


async def test_a_server_that_was_down_for_a_while_delays_an_answer():
    async with fake_site(max_failures=2) as (server, client):
        alone = await client.generate(PROMPT, PARAMS)
        server.faults.append(Fault("hang", 2))
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        while not server.streams:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        server.down = True
        server.drop_all()
        await asyncio.sleep(0.2)  # more probes than max_failures
        assert not task.done()
        server.down = False
        joined = await task
        assert joined.token_ids == alone.token_ids and joined.logprobs == alone.logprobs
        assert joined.num_resumes == 1 and [(s.start, s.end) for s in joined.spans] == [(0, 4)]


async def test_rejections_do_not_count_as_failures_and_a_resume_ends_the_wait():
    async with fake_site(*[Fault("reject")] * 30, max_failures=2) as (server, client):
        assert len((await client.generate(PROMPT, PARAMS)).token_ids) == 4
        assert len(server.requests) == 31
        client._state.note_refusal(QueueFull("full", retry_after=3600.0))
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        await asyncio.sleep(0.05)
        assert not task.done() and len(server.requests) == 31
        await client.resume()
        assert len((await task).token_ids) == 4


async def test_without_a_live_server_the_request_ends_at_its_deadline():
    async with fake_site() as (server, client):
        server.down = True
        with pytest.raises(RolloutFailed) as failed:
            await client.generate(PROMPT, PARAMS, timeout_s=0.3)
        assert failed.value.partial[0].token_ids == []


async def test_tokens_of_an_engine_that_restarted_without_the_published_weights_are_not_used():
    """The client detects the restart by the boot id in the events; no connection breaks."""
    async with fake_site() as (server, client):
        await client.update_weights(CHECKPOINT, version="one")
        assert await client.health() == {"boot_id": "boot-1", "stale": None}
        server.faults.append(Fault("abort", 2))
        server.boot_id, server.weight_epoch, server.version = "boot-2", 0, "0"
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        while not (await client.health())["stale"]:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert not task.done()
        await client.update_weights(CHECKPOINT, version="two")
        assert (await client.health())["stale"] is None
        got = await task
        assert {s.version for s in got.spans} == {"two"} and len(got.token_ids) == 4


async def test_a_frozen_stream_whose_engine_restarted_is_given_up_for_the_next_publication():
    """On the new engine the request would wait for weights, without a token and without an error."""
    async with fake_site(Fault("hang", 2)) as (server, client):
        await client.update_weights(CHECKPOINT)
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, session_id=5))
        while not server.streams:
            await asyncio.sleep(0.01)
        server.boot_id = "boot-2"
        while server.streams:
            await asyncio.sleep(0.01)
        assert not task.done()
        await client.update_weights(CHECKPOINT)
        assert (await task).num_resumes == 1
