"""Control calls over real engines: done on all members or on none, whatever one replica does."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastdeploy.core.errors import (
    EngineDead,
    FleetCallFailed,
    InvalidField,
    NotLeader,
    PauseBlocked,
    PauseInterrupted,
    UpdateInProgress,
    WeightUpdateRefused,
)
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet import running_call
from fastdeploy.fleet.call import Context
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.pause_calls import PauseCall
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.transaction import Command, Vote
from fastdeploy.inter_communicator import messages as m
from fleet.control_stack import control_stack, holds, served, spoil, statuses, update
from support.fake_runner import write_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_pause_holds_all_members_under_one_name_and_a_resume_releases_all():
    async with control_stack() as stack:
        report = await stack.control.call(m.PauseArgs("keep"))
        name = report["hold"]["id"]
        assert report["status"] == "paused" and report["is_paused"] and report["boot_id"] == "fleet-1"
        assert holds(stack) == {"r0": [name], "r1": [name]}
        assert statuses(report) == {"r0": "done", "r1": "done"}
        assert (await stack.control.call(m.PauseStatusArgs()))["holds"][0]["named"] is False
        report = await stack.control.call(m.ResumeArgs())
        assert (report["status"], report["released"], report["still_held_by"]) == ("running", [name], [])
        assert holds(stack) == {"r0": [], "r1": []} and stack.control.state.changing == 0


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_replica_that_is_lost_during_a_pause_is_fenced_and_the_others_are_paused(fault):
    async with control_stack(3) as stack:
        await stack.block(1)
        call, running = await stack.begin(m.PauseArgs("keep", hold_id="h"))
        if fault == "killed":
            await stack.replicas[1].client.close()
        else:
            loop = asyncio.get_running_loop()
            assert running._deadline.when() <= loop.time() + 5.0
            while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
                await asyncio.sleep(0)
            running._late(Command.PREPARE, loop.time() - 100)  # the timer is late itself: answers may wait unread
            assert not stack.fenced
            running._late(Command.PREPARE, loop.time())
        report = await call
        assert statuses(report) == {"r0": "done", "r1": "fenced", "r2": "done"}
        assert [entry["error"]["code"] for entry in report["replicas"] if "error" in entry] == ["engine_dead"]
        assert holds(stack) == {"r0": ["h"], "r2": ["h"]}
        assert (fault == "stopped") == ("no answer within the deadline" in stack.fenced.get("r1", ""))


async def test_replicas_get_more_time_if_most_of_them_are_late():
    """Then this process or its host may be the slow one. Nobody waits for longer than stall_s."""
    async with control_stack(3) as stack:
        await stack.block(0)
        await stack.block(1)
        call, running = await stack.begin(m.PauseArgs("keep", hold_id="h"))
        while Vote.PREPARED not in running._transaction.votes.values():
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        running._late(Command.PREPARE, loop.time())
        assert not stack.fenced
        stack.unblock(0)
        while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
            await asyncio.sleep(0)
        running._late(Command.PREPARE, loop.time())
        assert statuses(await call) == {"r0": "done", "r1": "fenced", "r2": "done"}
    async with control_stack(1) as stack:
        await stack.block(0)
        call, running = await stack.begin(m.PauseArgs("keep", hold_id="h"))
        running._patient_until = loop.time()
        running._late(Command.PREPARE, loop.time())
        with pytest.raises(EngineDead):
            await call


async def test_one_of_two_replicas_that_is_late_is_fenced_at_the_deadline():
    async with control_stack() as stack:
        await stack.block(1)
        call, running = await stack.begin(m.PauseArgs("keep", hold_id="h"))
        while Vote.PREPARED not in running._transaction.votes.values():
            await asyncio.sleep(0)
        running._late(Command.PREPARE, asyncio.get_running_loop().time())
        assert list(stack.fenced) == ["r1"] and statuses(await call) == {"r0": "done", "r1": "fenced"}


async def test_an_answer_that_came_in_time_counts_even_if_this_process_reads_it_late(monkeypatch):
    monkeypatch.setattr(running_call, "READ_S", 20.0)  # on a busy machine the fence of the pause takes its time, too
    async with control_stack(3, fence_after_s=60.0) as stack:
        await stack.block(1)
        call, running = await stack.begin(m.PauseArgs("keep", hold_id="h"))
        while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
            await asyncio.sleep(0)
        stack.unblock(1)
        while "h" not in stack.engines[1].engine.pause.holds:  # the event loop stands still meanwhile
            time.sleep(0.01)
        running._passed(Command.PREPARE, asyncio.get_running_loop().time())  # the deadline, before any answer is read
        assert statuses(await call) == {"r0": "done", "r1": "done", "r2": "done"}


async def test_a_refusal_of_one_replica_rolls_the_pause_back_on_all():
    async with control_stack() as stack:
        spoil(stack, 1, m.PauseArgs, WeightUpdateRefused("not now"))
        with pytest.raises(WeightUpdateRefused) as refused:
            await stack.control.call(m.PauseArgs("keep", hold_id="h"))
        entries = {entry["name"]: entry["status"] for entry in refused.value.detail["replicas"]}
        assert entries == {"r0": "rolled_back", "r1": "refused"}
        assert holds(stack) == {"r0": [], "r1": []} and not stack.control.state.holds
        assert not stack.fenced


async def test_different_refusals_are_one_error_that_shows_them_all():
    async with control_stack(3) as stack:
        spoil(stack, 0, m.PauseArgs, WeightUpdateRefused("a"))
        spoil(stack, 1, m.PauseArgs, UpdateInProgress("b"))
        with pytest.raises(FleetCallFailed) as failed:
            await stack.control.call(m.PauseArgs("keep", hold_id="h"))
        codes = {entry.get("error", {}).get("code") for entry in failed.value.detail["replicas"]}
        assert codes == {"weight_update_refused", "update_in_progress", None}
        assert not any(holds(stack).values())


async def test_clients_that_pause_and_resume_at_once_never_leave_it_half():
    async with control_stack() as stack:
        for step in range(12):
            calls = [m.PauseArgs("keep", hold_id="h"), m.ResumeArgs("h"), m.PauseArgs("wait"), m.ResumeArgs()]
            calls = calls[step % 4 :] + calls[: step % 4]
            results = await asyncio.gather(*map(stack.control.call, calls), return_exceptions=True)
            assert all(isinstance(result, dict | PauseInterrupted) for result in results), results
            held = holds(stack)
            assert len({tuple(names) for names in held.values()}) == 1, held
            assert sorted(name for _, name in stack.control.state.holds) == held["r0"]


async def test_a_resume_during_a_drain_interrupts_the_pause_everywhere():
    async with control_stack(runner={"step_s": 0.01}) as stack:
        request = AddRequest("x", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        stream = await stack.replicas[0].client.submit(request)
        await stream.reader.wait()
        pause = asyncio.ensure_future(stack.control.call(m.PauseArgs("wait", hold_id="h")))
        await asyncio.sleep(0)
        assert (await stack.control.call(m.ResumeArgs("h")))["status"] == "running"
        with pytest.raises(PauseInterrupted):
            await pause
        assert not any(holds(stack).values()) and not stack.control.state.holds
        stream.close()


async def test_a_hold_of_an_adapter_with_a_ttl_ends_and_that_of_the_same_name_on_all_requests_stands(tmp_path):
    async with control_stack(adapter_store=str(tmp_path)) as stack:
        await stack.control.call(m.LoadAdapterArgs("a", FolderSource(write_adapter(tmp_path / "a1", "a1"))))
        await stack.control.call(m.PauseArgs("keep", hold_id="h"))
        await stack.control.call(m.PauseArgs("keep", hold_id="h", scope="adapter:a", ttl_s=0.05))
        while len(stack.control.state.holds) == 2 or stack.control.state.changing:
            await asyncio.sleep(0)
        assert set(stack.control.state.holds) == {("engine", "h")}
        assert holds(stack) == {"r0": ["h"], "r1": ["h"]}


async def test_a_wait_of_an_adapter_that_one_replica_cannot_end_holds_no_replica(tmp_path):
    async with control_stack(adapter_store=str(tmp_path), runner={"step_s": 0.01}) as stack:
        await stack.control.call(m.LoadAdapterArgs("a", FolderSource(write_adapter(tmp_path / "a1", "a1"))))
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        stream = await stack.replicas[0].client.submit(AddRequest("x", [1, 2, 3], params, adapter="a"))
        await stream.reader.wait()
        await stack.control.call(m.PauseArgs("keep", hold_id="trainer"))
        with pytest.raises(PauseBlocked) as error:
            await stack.control.call(m.PauseArgs("wait", hold_id="tenant", scope="adapter:a"))
        assert error.value.detail["held_by"] == ["trainer"]
        assert statuses(error.value.detail) == {"r0": "refused", "r1": "rolled_back"}
        held = stack.in_engines(lambda engine: engine.scopes.holds())
        assert held == {"r0": ["trainer"], "r1": ["trainer"]}
        assert set(stack.control.state.holds) == {("engine", "trainer")}
        stream.close()


async def test_a_hold_with_a_ttl_ends_on_all_by_the_gateways_clock():
    async with control_stack() as stack:
        report = await stack.control.call(m.PauseArgs("keep", hold_id="h", ttl_s=60))
        assert 50 < report["hold"]["ttl_left_s"] <= 60
        expiries = stack.in_engines(lambda engine: engine.pause.holds["h"].expires_at - engine._clock())
        assert all(left > 80 for left in expiries.values())
        await stack.control.call(m.RenewArgs("h", ttl_s=0.05))
        while (await stack.control.call(m.PauseStatusArgs()))["holds"]:
            await asyncio.sleep(0)
        assert not any(holds(stack).values()) and not stack.control.state.holds


async def test_every_command_of_a_call_has_one_number_on_all_members():
    """A gateway that starts takes holds from the engines with the last number only."""
    async with control_stack() as stack:
        for replica in stack.replicas:
            await replica.client.call(m.LeadArgs("fleet-1", "me", 3, 30.0))
        for args, number in ((m.PauseArgs("keep"), 1), (m.PauseStatusArgs(), 1), (update(1), 3)):
            await stack.control.call(args)
            changes = stack.in_engines(lambda engine: engine.gateway_lease.last_change)
            assert changes == {"r0": (3, number), "r1": (3, number)}


async def test_a_caller_that_goes_away_leaves_a_whole_transaction():
    async with control_stack() as stack:
        call = asyncio.ensure_future(stack.control.call(update(1)))
        await asyncio.sleep(0)
        call.cancel()
        while stack.control.state.changing:
            await stack.control.call(m.PauseStatusArgs())
        assert served(stack) == {("v1", 1)} and stack.control.state.weight_epoch == 1


async def test_a_gateway_whose_replicas_another_one_leads_fences_nobody():
    async with control_stack() as stack:
        for replica in stack.replicas:
            other = await replica.client.call(m.LeadArgs("fleet-1", "other", 1, 30.0))
            assert other["term"] == 1
        for fake in stack.engines:
            fake.engine.gateway_lease.gateway = "another connection"
        with pytest.raises(NotLeader):
            await stack.control.call(m.PauseArgs("keep"))
        with pytest.raises(NotLeader):
            await stack.control.call(m.ResumeArgs())
        stack.control.fence(stack.replicas[0], "its upload failed")
        assert not stack.fenced and len(holds(stack)) == 2
        assert not (await stack.control.call(m.PauseStatusArgs()))["is_paused"]


async def test_a_fleet_without_members_and_calls_from_outside_are_refused():
    async with control_stack(1) as stack:
        with pytest.raises(NotLeader):
            await stack.control.call(m.LeadArgs("f", "c", 1, 1.0))
        text = (await stack.control.call(m.MetricsArgs()))["text"]
        assert 'replica="r0"' in text
        await stack.replicas[0].client.close()
        with pytest.raises(EngineDead):
            await stack.control.call(m.PauseArgs("keep"))


async def test_a_resume_that_all_replicas_refuse_leaves_the_hold_with_the_fleet():
    async with control_stack() as stack:
        await stack.control.call(m.PauseArgs("keep", hold_id="h"))
        for at in (0, 1):
            spoil(stack, at, m.ResumeArgs, WeightUpdateRefused("not now"))
        with pytest.raises(WeightUpdateRefused):
            await stack.control.call(m.ResumeArgs("h"))
        assert holds(stack) == {"r0": ["h"], "r1": ["h"]}
        assert set(stack.control.state.holds) == {("engine", "h")} and not stack.fenced


def paused(state: FleetState, *names: str) -> PauseCall:
    """Return a pause call on the hold "h" that was sent. names: replicas that have accepted it."""
    call = PauseCall(m.PauseArgs("keep", hold_id="h"), Context(state, FleetConfig(fleet_id="fleet-1"), 0.0))
    call.on_send()
    call.results, call.errors = dict.fromkeys(names, {}), {"r1": PauseBlocked("not now")}
    return call


def test_the_last_of_several_pauses_that_fail_releases_what_the_first_one_left_behind():
    state = FleetState()
    first, second = paused(state, "r0"), paused(state)
    first.on_rollback()
    third = paused(state)
    second.on_rollback()
    third.on_rollback()
    assert third.message_to_undo("r0") == m.ResumeArgs("h") and state.holds == {}
    assert first.message_to_undo("r0") is None and second.message_to_undo("r0") is None


async def test_a_reset_that_all_members_refuse_keeps_their_holds():
    async with control_stack() as stack:
        name = (await stack.control.call(m.PauseArgs("keep")))["hold"]["id"]
        with pytest.raises(InvalidField):
            await stack.control.call(m.ResetArgs(version=""))
        assert holds(stack) == {"r0": [name], "r1": [name]} and set(stack.control.state.holds) == {("engine", name)}
