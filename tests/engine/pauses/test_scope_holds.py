"""Holds, status and fences of pauses of adapters."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import EngineError
from fastdeploy.engine.pauses import scopes
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.inter_communicator import messages as m
from support.tenants import A, B, exact, paused_adapters, resume, run_out_exactly, tenants


def test_a_hold_of_an_adapter_ends_with_its_ttl_and_by_its_name_alone():
    """Neither a resume of the engine nor a wake-up releases it."""
    h = tenants()
    h.pause(mode="keep", scope=A, ttl_s=60.0)
    h.pause(mode="keep", scope=B, hold_id="mine")
    h.pause(mode="keep")
    h.resume()
    h.resume("mine")
    h.ask(m.SleepArgs(), rounds=5)
    h.ask(m.WakeArgs(), rounds=3)
    h.run_rounds(3)
    assert [s["holds"][0]["named"] for s in paused_adapters(h)] == [False, True]
    h.now += 60.0
    h.run_rounds()
    assert [s["lora_name"] for s in paused_adapters(h)] == ["b"]
    assert resume(h, B, "mine")["released"] == ["mine"]
    run_out_exactly(h)


def test_one_name_of_a_hold_is_a_hold_for_each_adapter_and_may_be_renewed_for_each():
    h = tenants()
    for scope in (A, B, "engine"):
        h.pause(mode="keep", scope=scope, hold_id="trainer", ttl_s=10.0)
    assert h.ask(m.RenewArgs("trainer", 30.0, scope=B)).result["hold"]["scope"] == B
    h.now += 20.0
    h.run_rounds()
    assert [s["lora_name"] for s in paused_adapters(h)] == ["b"] and not h.status()["holds"]
    assert h.ask(m.RenewArgs("trainer", 30.0, scope=A)).failure.code == "hold_not_found"
    h.now += 20.0
    run_out_exactly(h)


def test_the_number_of_holds_is_bounded_over_all_adapters_and_leaves_those_of_the_engine(monkeypatch):
    monkeypatch.setattr(scopes, "MAX_HOLDS", 2)
    h = tenants()
    assert all(h.pause(mode="keep", scope=scope, hold_id="x").failure is None for scope in (A, B))
    for scope in (A, B):
        h.assert_refused(m.PauseArgs(mode="keep", scope=scope), "hold_id")
        assert h.pause(mode="keep", scope=scope, hold_id="x").failure is None, "the same hold"
    assert h.pause(mode="keep").failure is None, "the tenants cannot keep the engine from being paused"
    assert h.ask(m.SleepArgs(), rounds=5).failure is None, "the engine's own holds are not counted"
    h.ask(m.WakeArgs(), rounds=3)
    resume(h, A, "x")
    assert h.pause(mode="keep", scope=B).failure is None


def test_the_status_of_a_name_shows_the_adapter_that_still_has_requests():
    h = tenants()
    h.unload_adapter("a")
    h.load_adapter("a", 3, version="new")
    h.unload_adapter("a")
    h.run_rounds(2)
    status = h.ask(m.PauseStatusArgs(A)).result
    assert status["counts"]["running"] and status["version"] == "1"
    run_out_exactly(h)


def test_a_reset_releases_the_anonymous_holds_of_all_adapters_and_names_those_that_stand():
    h = tenants()
    h.pause(mode="keep", scope=A)
    h.pause(mode="keep", scope=B, hold_id="mine")
    report = h.ask(m.ResetArgs()).result
    assert len(report["released"]) == 1 and report["still_held_by"] == ["mine"]
    h.load_adapter("a", 1)
    h.add("after", [5], max_tokens=2, adapter="a")
    h.run_out()
    assert exact(h, "after", [5], 2, adapter="a")


def test_the_drain_of_an_adapter_is_answered_when_the_engine_fails():
    h = tenants()
    call = h.call(m.PauseArgs(mode="wait", scope=A))
    h.run_rounds()
    h.runner.fail_next = True
    with pytest.raises(EngineError):
        h.engine.run()
    assert h.reply(call).failure.code == "engine_error" and h.reply(call).result["lora_name"] == "a"


# --------------------------------------------------------------------------- status


def test_the_status_of_the_engine_lists_each_adapter_with_a_hold():
    h = tenants()
    assert paused_adapters(h) == []
    h.pause(mode="keep", scope=A)
    call = h.call(m.PauseArgs(mode="wait", scope=B, hold_id="mine"))
    h.run_rounds()
    status = h.ask(m.PauseStatusArgs()).result
    assert not status["is_paused"] and not status["rejecting_new_requests"] and status["holds"] == []
    of_a, of_b = status["scopes"]
    assert (of_a["lora_name"], of_a["phase"], of_a["counts"]["frozen"]) == ("a", "paused", 2)
    assert (of_b["lora_name"], of_b["phase"], of_b["counts"]["running"]) == ("b", "draining", 3)
    for name, listed in (("a", of_a), ("b", of_b)):
        assert h.ask(m.PauseStatusArgs(f"adapter:{name}")).result == listed
    assert h.reply(call) is None
    resume(h, A)
    resume(h, B, "mine")
    assert paused_adapters(h) == []
    run_out_exactly(h)


def test_the_status_of_an_adapter_without_a_hold_is_its_own():
    h = tenants()
    h.pause(mode="keep")
    status = h.ask(m.PauseStatusArgs(B)).result
    assert (status["lora_name"], status["phase"], status["adapter_epoch"]) == ("b", "running", 1)
    assert not status["is_paused"] and "scopes" not in status


@pytest.mark.parametrize(
    "args",
    [m.PauseArgs(scope="adapter:c"), m.ResumeArgs(scope="adapter:c"), m.RenewArgs("x", scope="adapter:c"),
     m.PauseStatusArgs("adapter:c")],
    ids=lambda args: type(args).__name__,
)  # fmt: skip
def test_an_unknown_adapter_is_refused(args):
    h = tenants()
    failure = h.failure(args)
    assert (failure.code, failure.detail["param"]) == ("model_not_found", "lora_name") and "'c'" in failure.message
    h.add("r", [1], adapter="c")
    h.run_rounds()
    assert h.rejected("r").code == "model_not_found"


# --------------------------------------------------------------------------- fences and steps


def test_a_fence_of_an_adapter_waits_for_the_acknowledgement_of_each_client():
    h = tenants()
    h.transport.mute.add("a")
    call = h.call(m.PauseArgs(mode="keep", scope=A))
    h.run_rounds(5)
    assert h.reply(call) is None
    assert len(h.sent(m.Fence)) == 1, "outputs of b need no further fence"
    h.acknowledge()
    assert h.reply(call).result["is_paused"]


def test_a_pause_of_one_adapter_does_not_abandon_the_step_in_flight():
    for mode in ("abort", "keep", "wait"):
        h = tenants()
        completed = len(h.runner.plans)
        h.runner.in_step = lambda h=h, mode=mode: h.call(m.PauseArgs(mode=mode, scope=A))
        h.run_rounds()
        assert len(h.runner.plans) == completed + 1 and h.metric("steps_abandoned_total") == 0


def test_an_adapter_that_is_paused_costs_no_time_per_step(monkeypatch):
    h = tenants()
    settled, settle = [], PauseState.settle
    monkeypatch.setattr(PauseState, "settle", lambda pause: (settled.append(pause.scope.id), settle(pause)))
    h.pause(mode="keep", scope=A, ttl_s=60.0)
    h.run_rounds()
    settled.clear()
    h.run_rounds(10)
    assert A not in settled
    h.now += 60.0
    h.run_rounds()
    assert A in settled and paused_adapters(h) == []


def test_the_loop_wakes_for_the_holds_and_the_fences_of_each_adapter():
    h = tenants(heartbeat_s=1000.0)
    h.pause(mode="keep", scope=B, ttl_s=60.0)
    h.pause(mode="keep", scope=A, ttl_s=30.0)
    assert h.engine.scopes.next_deadline() == h.now + 30.0
    h.transport.mute.add("a")
    h.call(m.PauseArgs(mode="keep", scope=B))
    h.run_rounds()
    assert h.now < h.engine.scopes.next_deadline() < h.now + 30.0, "the fence"
