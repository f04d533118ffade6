"""Pausing many replicas as one: all are paused, or none stays paused."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from fastdeploy.rl.errors import FleetError
from fastdeploy.rl.replica import Replica
from rl.fake_server import fleet
from support.loop_clock import pass_time


async def test_a_paused_block_pauses_all_replicas_by_one_hold_and_resumes_all():
    async with fleet() as (servers, client):
        async with client.paused("abort", clear_cache=False) as reports:
            assert [r.replica for r in reports] == [s.url for s in servers] and all(r.ok for r in reports)
            assert len({hold for s in servers for hold in s.holds}) == 1
            assert [list(s.holds.values()) for s in servers] == [["abort"]] * 3
            assert servers[0].calls[-1][1]["clear_cache"] is False
            assert await client.is_paused()
        assert [s.holds for s in servers] == [{}] * 3


async def test_if_one_pause_fails_no_replica_stays_paused_and_each_has_a_report():
    async with fleet() as (servers, client):
        servers[1].refuse["/v1/pause"] = deque([(504, "pause_timeout")])
        with pytest.raises(FleetError) as failed:
            await client.pause("keep")
        assert [r.ok for r in failed.value.reports] == [True, False, True]
        assert failed.value.reports[1].error.code == "pause_timeout"
        assert [s.holds for s in servers] == [{}] * 3
        assert all("/v1/resume" in s.paths() for s in servers), "its hold may stand on the failed replica too"


async def test_a_pause_whose_answer_is_lost_is_repeated_with_the_same_hold():
    async with fleet() as (servers, client):
        servers[2].refuse["/v1/pause"] = deque([(0, "drop"), (0, "drop")])
        await client.pause("keep", hold_id="mine")
        assert [s.holds for s in servers] == [{"mine": "keep"}] * 3
        assert [body["hold_id"] for body in servers[2].bodies("/v1/pause")] == ["mine"] * 3


async def test_a_replica_that_cannot_be_reached_fails_the_pause_within_its_deadline_and_frees_the_others(monkeypatch):
    answered, call = [], Replica.call

    async def noted(replica: Replica, method: str, path: str, *args: Any, **fields: Any) -> dict[str, Any]:
        result = await call(replica, method, path, *args, **fields)
        answered.append(path)
        return result

    monkeypatch.setattr(Replica, "call", noted)
    async with fleet(control_s=30.0) as (servers, client):
        servers[0].down = True
        task = asyncio.create_task(client.pause("keep", timeout_s=10.0))
        for path in ("/v1/pause", "/v1/resume"):
            while answered.count(path) < 2:
                await asyncio.sleep(0.005)
            assert not task.done()
            pass_time(40.0)
        with pytest.raises(FleetError, match="could not be released everywhere") as failed:
            await task
        assert [r.ok for r in failed.value.reports] == [False, True, True]
        assert "the hold may stand" in failed.value.reports[0].error.message
        assert [s.holds for s in servers[1:]] == [{}] * 2


@pytest.mark.parametrize("how", ["exception", "cancellation", "cancelled twice"])
async def test_any_exit_of_a_paused_block_releases_the_hold(how):
    async with fleet() as (servers, client):
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
        assert [s.holds for s in servers] == [{}] * 3


async def test_a_cancelled_pause_leaves_no_hold():
    async with fleet(2) as (servers, client):
        servers[0].refuse["/v1/pause"] = deque([(0, "drop")] * 1000)
        task = asyncio.create_task(client.pause("keep"))
        while not servers[1].holds:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [s.holds for s in servers] == [{}] * 2


async def test_a_resume_releases_the_holds_of_this_client_only():
    async with fleet(1) as (servers, client):
        servers[0].holds["other"] = "keep"
        await client.pause("keep", hold_id="a")
        await client.pause("wait", hold_id="b")
        await client.resume("a")
        assert set(servers[0].holds) == {"other", "b"}
        await client.resume()
        assert set(servers[0].holds) == {"other"}
