"""Control calls over real engines: done on all members or on none, whatever one replica does."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastdeploy.core.errors import (
    EngineDead,
    FleetCallFailed,
    NotLeader,
    PauseInterrupted,
    SessionNotFound,
    UpdateInProgress,
    WeightUpdateRefused,
)
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet import running_call
from fastdeploy.fleet.plans import CALLS, PLANS
from fastdeploy.fleet.transaction import Step, Vote
from fastdeploy.inter_communicator import messages as m
from fleet.control_stack import ControlStack, control_stack
from support.fake_runner import write_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def holds(stack: ControlStack) -> dict[str, list[str]]:
    return stack.in_engines(lambda engine: sorted(engine.pause.holds))


def served(stack: ControlStack) -> set[tuple[str, int]]:
    labels = stack.in_engines(lambda engine: engine.scopes.whole.weights_label()).values()
    return {(label["version"], label["weight_epoch"]) for label in labels}


def update(k: int, **fields) -> m.UpdateWeightsArgs:
    return m.UpdateWeightsArgs(FolderSource(f"/w{k}"), version=f"v{k}", **fields)


def statuses(report: dict) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in report["replicas"]}


def test_every_call_has_a_plan():
    assert set(PLANS) == set(CALLS)


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
        call = asyncio.ensure_future(stack.control.call(m.PauseArgs("keep", hold_id="h")))
        await asyncio.sleep(0)
        (running,) = stack.control._runs
        if fault == "killed":
            await stack.replicas[1].client.close()
        else:
            loop = asyncio.get_running_loop()
            assert running._deadline.when() <= loop.time() + 5.0
            while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
                await asyncio.sleep(0)
            running._late(Step.PREPARE, loop.time() - 100)  # the timer is late itself: answers may wait unread
            assert not stack.fenced
            running._late(Step.PREPARE, loop.time())
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
        call = asyncio.ensure_future(stack.control.call(m.PauseArgs("keep", hold_id="h")))
        await asyncio.sleep(0)
        (running,) = stack.control._runs
        while Vote.PREPARED not in running._transaction.votes.values():
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        running._late(Step.PREPARE, loop.time())
        assert not stack.fenced
        stack.unblock(0)
        while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
            await asyncio.sleep(0)
        running._late(Step.PREPARE, loop.time())
        assert statuses(await call) == {"r0": "done", "r1": "fenced", "r2": "done"}
    async with control_stack(1) as stack:
        await stack.block(0)
        call = asyncio.ensure_future(stack.control.call(m.PauseArgs("keep", hold_id="h")))
        await asyncio.sleep(0)
        (running,) = stack.control._runs
        running._patient_until = loop.time()
        running._late(Step.PREPARE, loop.time())
        with pytest.raises(EngineDead):
            await call


async def test_one_of_two_replicas_that_is_late_is_fenced_at_the_deadline():
    async with control_stack() as stack:
        await stack.block(1)
        call = asyncio.ensure_future(stack.control.call(m.PauseArgs("keep", hold_id="h")))
        await asyncio.sleep(0)
        (running,) = stack.control._runs
        while Vote.PREPARED not in running._transaction.votes.values():
            await asyncio.sleep(0)
        running._late(Step.PREPARE, asyncio.get_running_loop().time())
        assert list(stack.fenced) == ["r1"] and statuses(await call) == {"r0": "done", "r1": "fenced"}


async def test_an_answer_that_came_in_time_counts_even_if_this_process_reads_it_late(monkeypatch):
    monkeypatch.setattr(running_call, "READ_S", 20.0)  # on a busy machine the fence of the pause takes its time, too
    async with control_stack(3, fence_after_s=60.0) as stack:
        await stack.block(1)
        call = asyncio.ensure_future(stack.control.call(m.PauseArgs("keep", hold_id="h")))
        await asyncio.sleep(0)
        (running,) = stack.control._runs
        while list(running._transaction.votes.values()).count(Vote.PREPARED) < 2:
            await asyncio.sleep(0)
        stack.unblock(1)
        while "h" not in stack.engines[1].engine.pause.holds:  # the event loop stands still meanwhile
            time.sleep(0.01)
        running._passed(Step.PREPARE, asyncio.get_running_loop().time())  # the deadline, before any answer is read
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


def spoil(stack: ControlStack, at: int, kind: type, error: Exception, after: int = 0) -> None:
    """Let an engine refuse one call of a type, after it has done ``after`` of them."""
    table = next(t for t in (stack.engines[at].engine._on_call, stack.engines[at].engine._on_call_of) if kind in t)
    before, left = table[kind], [after]

    def refuse(*args):
        left[0] -= 1
        if left[0] == -1:
            raise error
        return before(*args)

    table[kind] = refuse


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


async def test_an_update_in_one_call_gives_all_members_one_epoch_and_one_version():
    async with control_stack() as stack:
        report = await stack.control.call(update(1))
        assert (report["version"], report["weight_epoch"], report["status"]) == ("v1", 1, "committed")
        assert served(stack) == {("v1", 1)}
        state = stack.control.state
        assert (state.version, state.weight_epoch, state.source) == ("v1", 1, FolderSource("/w1"))
        assert state.fingerprint == report["fingerprint"] and state.changing == 0
        assert [replica.weight_epoch for replica in stack.replicas] == [1, 1]


@pytest.mark.parametrize("kind", [m.BeginUpdateArgs, m.UpdateChunkArgs, m.CommitUpdateArgs])
async def test_an_update_that_one_replica_refuses_leaves_the_old_weights_everywhere(kind):
    async with control_stack() as stack:
        spoil(stack, 1, kind, UpdateInProgress("not now"))
        with pytest.raises(UpdateInProgress):
            await stack.control.call(update(1))
        assert {epoch for _, epoch in served(stack)} == {0}
        assert set(stack.in_engines(lambda engine: engine.weights.session).values()) == {None}
        assert not stack.fenced
        report = await stack.control.call(update(2))
        assert served(stack) == {("v2", report["weight_epoch"])}


async def test_a_replica_that_refuses_a_commit_which_others_have_made_is_fenced():
    async with control_stack() as stack:
        spoil(stack, 1, m.CommitUpdateArgs, UpdateInProgress("not now"), after=1)
        report = await stack.control.call(update(1))
        assert statuses(report) == {"r0": "done", "r1": "fenced"}
        assert served(stack) == {("v1", 1)} and list(stack.fenced) == ["r1"]


async def test_a_commit_that_all_replicas_refuse_leaves_the_old_weights_and_no_session():
    async with control_stack() as stack:
        for at in (0, 1):
            spoil(stack, at, m.CommitUpdateArgs, UpdateInProgress("not now"), after=1)
        with pytest.raises(UpdateInProgress):
            await stack.control.call(update(1))
        assert {epoch for _, epoch in served(stack)} == {0} and not stack.fenced
        assert stack.in_engines(lambda engine: engine.weights.session) == {"r0": None, "r1": None}


async def test_every_step_of_a_call_has_one_number_on_all_members():
    """A gateway that starts takes holds from the engines with the last number only."""
    async with control_stack() as stack:
        for replica in stack.replicas:
            await replica.client.call(m.LeadArgs("fleet-1", "me", 3, 30.0))
        for args, number in ((m.PauseArgs("keep"), 1), (m.PauseStatusArgs(), 1), (update(1), 3)):
            await stack.control.call(args)
            changes = stack.in_engines(lambda engine: engine.leadership.last_change)
            assert changes == {"r0": (3, number), "r1": (3, number)}


@pytest.mark.parametrize("lost_at", [0, 1, 2, 3])
async def test_a_session_goes_on_without_a_replica_that_is_lost_at_any_step(lost_at):
    async with control_stack(3) as stack:

        async def step(number: int, args: m.Args) -> dict:
            call = asyncio.ensure_future(stack.control.call(args))
            if number == lost_at:
                await asyncio.sleep(0)
                await stack.replicas[2].client.close()
            return await call

        session = (await step(0, m.BeginUpdateArgs(version="v5", idempotency_key="k")))["session_id"]
        assert (await stack.control.call(m.WeightInfoArgs()))["session"]["session_id"] == session
        part = await step(1, m.UpdateChunkArgs(session, FolderSource("/w5")))
        assert part["session_id"] == session and stack.control.state.changing == 1
        await step(2, m.CheckUpdateArgs(session))
        report = await step(3, m.CommitUpdateArgs(session))
        assert served(stack) == {("v5", 1)} and report["session_id"] == session
        assert stack.control.state.changing == 0 and len(holds(stack)) == 2
        with pytest.raises(SessionNotFound):
            await stack.control.call(m.UpdateChunkArgs(session, FolderSource("/w6")))


async def test_the_same_key_finds_the_same_session_and_an_abort_ends_it_on_all():
    async with control_stack() as stack:
        begin = m.BeginUpdateArgs(idempotency_key="k")
        first, second = await stack.control.call(begin), await stack.control.call(begin)
        assert first["session_id"] == second["session_id"] and stack.control.state.changing == 1
        assert (await stack.control.call(m.AbortUpdateArgs()))["aborted"] == [first["session_id"]]
        assert set(stack.in_engines(lambda engine: engine.weights.session).values()) == {None}
        assert stack.control.state.changing == 0


async def test_an_adapter_that_one_replica_refuses_is_loaded_nowhere(tmp_path):
    async with control_stack(adapter_store=str(tmp_path)) as stack:
        load = m.LoadAdapterArgs("lora", FolderSource(write_adapter(tmp_path / "a1", "a1")))
        spoil(stack, 0, m.LoadAdapterArgs, WeightUpdateRefused("too large"))
        with pytest.raises(WeightUpdateRefused):
            await stack.control.call(load)
        assert set(stack.in_engines(lambda engine: engine.adapters.num_known).values()) == {0}
        assert (await stack.control.call(load))["adapter_epoch"] == 1
        assert (await stack.control.call(load))["adapter_epoch"] == 2
        listed = (await stack.control.call(m.AdaptersArgs()))["adapters"]
        assert [(a["lora_name"], a["adapter_epoch"]) for a in listed] == [("lora", 2)]
        assert stack.control.state.adapters["lora"][1] == 2
        await stack.control.call(m.UnloadAdapterArgs("lora"))
        assert set(stack.in_engines(lambda engine: engine.adapters.num_known).values()) == {0}


async def test_a_sleep_that_one_replica_refuses_wakes_the_others():
    async with control_stack() as stack:
        spoil(stack, 1, m.SleepArgs, WeightUpdateRefused("no room"))
        with pytest.raises(WeightUpdateRefused):
            await stack.control.call(m.SleepArgs())
        assert not any(holds(stack).values()) and stack.control.state.asleep == ()
        assert (await stack.control.call(m.SleepArgs()))["asleep"] == ["kv_cache", "weight"]
        assert (await stack.control.call(m.WakeArgs()))["asleep"] == []
        assert not stack.fenced


async def test_sleeps_and_wake_ups_that_overlap_are_made_one_after_the_other():
    async with control_stack() as stack:
        calls = (m.SleepArgs(("weight",)), m.SleepArgs(("kv_cache",)), m.WakeArgs(), m.SleepArgs(("weight",)))
        reports = await asyncio.gather(*(stack.control.call(args) for args in calls))
        assert [report["asleep"] for report in reports] == [["weight"], ["kv_cache", "weight"], [], ["weight"]]
        asleep = stack.in_engines(lambda engine: engine.sleeper._runner.asleep)
        assert set(map(tuple, asleep.values())) == {stack.control.state.asleep} == {("weight",)}
        assert not stack.fenced


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
            fake.engine.leadership.gateway = "another connection"
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


async def test_a_refused_part_ends_the_session_whose_begin_was_not_answered_yet():
    """Both calls are sent at once, so the part knows its session by ``placed_by`` only."""
    async with control_stack() as stack:
        begin = asyncio.ensure_future(stack.control.call(m.BeginUpdateArgs(placed_by="trainer")))
        await asyncio.sleep(0)  # the begin is sent
        part = m.UpdateChunkArgs(None, FolderSource("/not-weights"), placed_by="trainer")
        with pytest.raises(WeightUpdateRefused):
            await stack.control.call(part)
        await begin
        assert stack.in_engines(lambda engine: engine.weights.session) == {"r0": None, "r1": None}
        assert stack.control.state.changing == 0, "nobody could join any more"


@pytest.mark.parametrize("folder", ["/w5", "/not-weights"])
async def test_a_part_is_of_the_session_that_the_engines_have_though_its_caller_began_and_aborted_another_one(folder):
    """All calls are sent at once. So the gateway cannot tell by ``placed_by`` which session the part is for."""
    async with control_stack() as stack:
        begin = m.BeginUpdateArgs(placed_by="trainer")
        part = m.UpdateChunkArgs(None, FolderSource(folder), placed_by="trainer")
        calls = map(stack.control.call, (begin, m.AbortUpdateArgs(), begin, part))
        first, aborted, second, answer = await asyncio.gather(*calls, return_exceptions=True)
        assert aborted["aborted"] == [first["session_id"]] != [second["session_id"]]
        if folder == "/w5":
            assert answer["session_id"] == second["session_id"]
            await stack.control.call(m.AbortUpdateArgs(second["session_id"]))
        else:
            assert isinstance(answer, WeightUpdateRefused)
        assert stack.in_engines(lambda engine: engine.weights.session) == {"r0": None, "r1": None}
        assert stack.control.state.changing == 0, "nobody could join any more"
