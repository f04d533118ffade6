"""Control calls for weights, adapters and sleep over real engines: done on all members or on none."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from e2e.server import until
from fastdeploy.core.errors import (
    SessionNotFound,
    UpdateInProgress,
    WeightUpdateRefused,
    WrongOrder,
)
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.adapters.store import AdapterStore
from fastdeploy.fleet.call import Context
from fastdeploy.fleet.calls import call_for
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.transaction import Command
from fastdeploy.inter_communicator import messages as m
from fleet.control_stack import control_stack, holds, served, spoil, statuses, update
from support.fake_runner import adapter_fingerprint, write_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_an_update_in_one_call_gives_all_members_one_epoch_and_one_version():
    async with control_stack() as stack:
        report = await stack.control.call(update(1))
        assert (report["version"], report["weight_epoch"], report["status"]) == ("v1", 1, "committed")
        assert served(stack) == {("v1", 1)}
        state = stack.control.state
        assert (state.version, state.weight_epoch, state.source) == ("v1", 1, FolderSource("/w1"))
        assert state.fingerprint == report["fingerprint"] and state.changing == 0
        assert [replica.weight_epoch for replica in stack.replicas] == [1, 1]


@pytest.mark.parametrize("kind", [m.BeginUpdateArgs, m.UpdatePartArgs, m.CommitUpdateArgs])
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
        part = await step(1, m.UpdatePartArgs(session, FolderSource("/w5")))
        assert part["session_id"] == session and stack.control.state.changing == 1
        await step(2, m.CheckUpdateArgs(session))
        report = await step(3, m.CommitUpdateArgs(session))
        assert served(stack) == {("v5", 1)} and report["session_id"] == session
        assert stack.control.state.changing == 0 and len(holds(stack)) == 2
        with pytest.raises(SessionNotFound):
            await stack.control.call(m.UpdatePartArgs(session, FolderSource("/w6")))


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
        assert stack.control.state.adapters["lora"].epoch == 2
        await stack.control.call(m.UnloadAdapterArgs("lora"))
        assert set(stack.in_engines(lambda engine: engine.adapters.num_known).values()) == {0}


def test_a_load_waits_for_a_hung_replica_for_its_one_time_out_and_until_the_fence():
    load = m.LoadAdapterArgs("lora", FolderSource("/a"), timeout_s=3.0)
    call = call_for(load, Context(FleetState(), FleetConfig(fleet_id="fleet-1", fence_after_s=2.0), 0.0))
    assert call.timeout_s(Command.PREPARE) == 5.0


async def test_after_a_reset_no_member_and_no_joiner_has_an_adapter_of_the_run_before(tmp_path):
    async with control_stack(adapter_store=str(tmp_path)) as stack:
        load = m.LoadAdapterArgs("lora", FolderSource(write_adapter(tmp_path / "a1", "a1")), replace=False)
        await stack.control.call(load)
        assert (await stack.control.call(m.ResetArgs()))["adapters_unloaded"] == ["lora"]
        assert set(stack.in_engines(lambda engine: engine.adapters.num_known).values()) == {0}
        assert stack.control.state.adapters == {}, "a joiner gets these"
        assert (await stack.control.call(load))["status"] == "loaded", "the next run may use the same names"


async def test_an_adapter_that_the_members_have_read_differently_is_loaded_nowhere(tmp_path):
    async with control_stack(adapter_store=str(tmp_path)) as stack:
        folder = write_adapter(tmp_path / "source", "a1")
        load = m.LoadAdapterArgs("lora", FolderSource(folder))
        assert (await stack.control.call(load))["fingerprint"] == adapter_fingerprint("a1")
        store, copy = stack.engines[1].engine.adapters.store, AdapterStore.copy

        def late_copy(*args) -> None:  # the trainer writes the next adapter when the first engine has its copy
            until(lambda: stack.engines[0].engine.adapters.prepared(), 20, "the other engine has its copy")
            write_adapter(tmp_path / "source", "a2")
            copy(store, *args)

        store.copy = late_copy
        with pytest.raises(WeightUpdateRefused, match="lora_name: .* has read another adapter"):
            await stack.control.call(load)
        assert set(stack.in_engines(lambda engine: tuple(engine.adapters.prepared())).values()) == {()}
        found = stack.in_engines(lambda engine: engine.adapters.describe()["adapters"][0]["fingerprint"])
        assert set(found.values()) == {adapter_fingerprint("a1")} and not stack.fenced
        del store.copy
        report = await stack.control.call(load)
        assert (report["adapter_epoch"], report["fingerprint"]) == (2, adapter_fingerprint("a2"))


async def test_an_update_whose_eos_ids_the_members_have_read_differently_is_made_nowhere():
    async with control_stack() as stack:
        table = stack.engines[1].engine._on_call
        before = table[m.UpdatePartArgs]
        other = FolderSource("/w1-eos7")
        table[m.UpdatePartArgs] = lambda args, *rest: before(msgspec.structs.replace(args, source=other), *rest)
        with pytest.raises(WeightUpdateRefused, match="not those of other replicas"):
            await stack.control.call(update(1))
        assert {epoch for _, epoch in served(stack)} == {0} and not stack.fenced


async def test_no_number_of_an_adapter_is_used_twice(tmp_path):
    """Not after an unload, and not after a load that failed while it was committed."""
    async with control_stack(adapter_store=str(tmp_path)) as stack:
        load = m.LoadAdapterArgs("lora", FolderSource(write_adapter(tmp_path / "a1", "a1")))
        for number in (1, 2):
            assert (await stack.control.call(load))["adapter_epoch"] == number
            await stack.control.call(m.UnloadAdapterArgs("lora"))
        for at in (0, 1):
            spoil(stack, at, m.EndLoadArgs, WeightUpdateRefused("not now"))
        with pytest.raises(WeightUpdateRefused):
            await stack.control.call(load)
        assert stack.control.state.adapters == {} and stack.control.state.past_adapter_epoch == 3
        assert (await stack.control.call(load))["adapter_epoch"] == 4
        assert (await stack.control.call(load))["adapter_epoch"] == 5


async def test_a_reset_between_the_two_phases_of_a_load_costs_no_member(tmp_path):
    load = m.LoadAdapterArgs("lora", FolderSource(write_adapter(tmp_path / "a1", "a1")))
    async with control_stack() as stack:
        for engine in stack.engines[1:]:  # the first one has prepared the load when the reset comes
            engine.runner.may_stage.clear()
        call, running = await stack.begin(load)
        while not running._call.results:
            await asyncio.sleep(0.005)
        await stack.control.call(m.ResetArgs())
        with pytest.raises(WrongOrder):
            await call
        stack.engines[1].runner.may_stage.set()
        assert not stack.fenced and stack.control.state.adapters == {}
        assert (await stack.control.call(load))["adapter_epoch"] == 1


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


async def test_a_refused_part_ends_the_session_whose_begin_was_not_answered_yet():
    """Both calls are sent at once, so the part knows its session by ``placed_by`` only."""
    async with control_stack() as stack:
        begin = asyncio.ensure_future(stack.control.call(m.BeginUpdateArgs(placed_by="trainer")))
        await asyncio.sleep(0)  # the begin is sent
        part = m.UpdatePartArgs(None, FolderSource("/not-weights"), placed_by="trainer")
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
        part = m.UpdatePartArgs(None, FolderSource(folder), placed_by="trainer")
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
