"""Pauses of a client: a pause that fails or is cancelled leaves no hold."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from fastdeploy.core.errors import FastDeployError, NotLeader
from fastdeploy.rl.errors import Unreachable
from rl.fake_server import fake_site
from support.loop_clock import pass_time


async def test_a_paused_block_places_one_hold_and_releases_it():
    async with fake_site() as (server, client):
        async with client.paused("abort", clear_cache=False) as report:
            assert report["is_paused"] and list(server.holds.values()) == ["abort"]
            assert server.calls[-1][1]["clear_cache"] is False
            assert await client.is_paused()
        assert server.holds == {}


async def test_a_pause_that_fails_raises_the_servers_error_and_its_hold_is_released():
    async with fake_site() as (server, client):
        server.refuse["/v1/pause"] = deque([(504, "pause_timeout")])
        with pytest.raises(FastDeployError) as failed:
            await client.pause("keep")
        assert failed.value.code == "pause_timeout" and not hasattr(failed.value, "__notes__")
        assert server.paths()[-1] == "/v1/resume", "its hold may stand all the same"


async def test_a_pause_whose_answer_is_lost_is_repeated_with_the_same_hold():
    async with fake_site() as (server, client):
        server.refuse["/v1/pause"] = deque([(0, "drop"), (0, "drop_reply")])
        await client.pause("keep", hold_id="mine")
        assert server.holds == {"mine": "keep"}
        assert [body["hold_id"] for body in server.bodies("/v1/pause")] == ["mine"] * 3


async def test_a_server_that_cannot_be_reached_fails_the_pause_within_its_deadline():
    async with fake_site(control_s=30.0) as (server, client):
        server.down = True
        task = asyncio.create_task(client.pause("keep", timeout_s=10.0))
        for _ in range(2):  # the pause, and then the release of its hold
            await asyncio.sleep(0.1)
            assert not task.done()
            pass_time(40.0)
        with pytest.raises(Unreachable) as failed:
            await task
        (note,) = failed.value.__notes__
        assert note.startswith("the hold may stand until its ttl ends")


async def test_an_engine_of_a_fleet_refuses_the_pause_and_has_no_hold():
    async with fake_site() as (server, client):
        server.refuse["/v1/pause"] = deque([(409, "not_leader")])
        server.refuse["/v1/resume"] = deque([(409, "not_leader")])
        with pytest.raises(NotLeader) as refused:
            await client.pause()
        assert not hasattr(refused.value, "__notes__")


@pytest.mark.parametrize("how", ["exception", "cancellation", "cancelled twice"])
async def test_any_exit_of_a_paused_block_releases_the_hold(how):
    async with fake_site() as (server, client):
        inside = asyncio.Event()

        async def work():
            async with client.paused():
                inside.set()
                if how == "exception":
                    raise ValueError("of the trainer")
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await inside.wait()
        if how != "exception":
            task.cancel()
            await asyncio.sleep(0)
            if how == "cancelled twice":
                task.cancel()
        with pytest.raises(ValueError if how == "exception" else asyncio.CancelledError):
            await task
        assert server.holds == {}


async def test_a_cancelled_pause_leaves_no_hold():
    async with fake_site() as (server, client):
        server.refuse["/v1/pause"] = deque([(0, "drop_reply")] * 1000)
        task = asyncio.create_task(client.pause("keep"))
        while not server.holds:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.holds == {}


async def test_a_resume_releases_the_holds_of_this_client_only():
    async with fake_site() as (server, client):
        server.holds["other"] = "keep"
        await client.pause("keep", hold_id="a")
        await client.pause("wait", hold_id="b")
        await client.resume("a")
        assert set(server.holds) == {"other", "b"}
        await client.resume()
        assert set(server.holds) == {"other"}
