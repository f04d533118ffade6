"""Holds: who placed them, which resume releases them, their ttl and its renewal."""

from __future__ import annotations

import pytest

from engine.pause_calls import busy, call_pause, tokens_of
from fastdeploy.engine.pauses import scopes
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import Harness

# --------------------------------------------------------------------------- holds


def test_an_anonymous_resume_leaves_named_and_system_holds():
    h = Harness(lost_commit=True)
    h.run_rounds()
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="trainer")
    reply = h.resume().result
    assert (
        reply["status"] == "held" and reply["still_held_by"] == ["republish", "trainer"] and len(reply["released"]) == 1
    )
    assert h.status()["is_paused"]
    assert h.resume("trainer").result["still_held_by"] == ["republish"]
    assert h.resume("republish").result["status"] == "running", "an operator may release this hold by name"


def test_a_resume_of_an_unknown_hold_says_so_and_changes_nothing():
    h = Harness()
    h.pause(mode="keep")
    reply = h.resume("nobody")
    assert reply.failure is None and reply.result["unknown"] == ["nobody"] and reply.result["released"] == []
    assert h.status()["is_paused"]


def test_resume_without_a_pause_is_harmless():
    h = Harness()
    assert h.resume().result["status"] == "running"


def test_the_same_name_is_the_same_hold_and_its_ttl_is_renewed():
    h = Harness()
    h.pause(mode="keep", hold_id="x", ttl_s=10.0)
    h.now += 8
    h.pause(mode="keep", hold_id="x", ttl_s=10.0)
    h.now += 8
    h.run_rounds()
    assert [hold["id"] for hold in h.status()["holds"]] == ["x"]
    h.now += 3
    h.run_rounds()
    assert h.status()["holds"] == [] and h.status()["phase"] == "running"


def test_a_hold_ends_after_its_ttl():
    h = busy(max_tokens=12)
    h.pause(mode="keep", ttl_s=5.0)
    h.now += 5.1
    h.run_out()
    assert tokens_of(h) == [12] * 6


def test_a_pause_whose_ttl_ends_during_its_drain_is_interrupted():
    h = busy()
    call = call_pause(h, mode="wait", ttl_s=5.0)
    h.now += 5.1
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_interrupted" and h.status()["phase"] == "running"


def test_a_pause_that_names_an_anonymous_hold_makes_it_a_named_one():
    h = Harness()
    name = h.pause(mode="keep").result["hold"]["id"]
    h.pause(mode="keep", hold_id=name)
    assert h.resume().result["still_held_by"] == [name]


def test_a_pause_cannot_take_over_a_hold_of_the_system():
    h = Harness(lost_commit=True)
    assert h.pause(mode="abort", hold_id="republish").failure.code == "invalid_field"
    assert h.status()["mode"] == "keep"


def test_the_number_of_holds_is_bounded(monkeypatch):
    monkeypatch.setattr(scopes, "MAX_HOLDS", 2)
    h = Harness()
    h.pause(mode="keep")
    h.pause(mode="keep", hold_id="x")
    assert h.pause(mode="keep").failure.code == "invalid_field"
    assert h.pause(mode="keep", hold_id="x").failure is None


def test_a_wait_by_another_controller_does_not_end_the_freeze_of_a_keep():
    h = busy()
    h.pause(mode="keep", hold_id="trainer")
    before = h.runner.computed_tokens
    h.pause(mode="wait", hold_id="other")
    h.run_rounds(3)
    h.resume("trainer")
    h.run_rounds(3)
    assert h.runner.computed_tokens == before and h.status()["is_paused"]
    h.resume("other")
    h.run_rounds()
    assert h.runner.computed_tokens > before


def test_a_wait_drains_once_the_keep_that_joined_it_is_released():
    h = busy(max_tokens=12)
    h.connect("b")
    h.transport.mute.add("b")
    waiting = call_pause(h, mode="wait", hold_id="w", timeout_s=500.0)
    keeping = call_pause(h, mode="keep", hold_id="k")
    before = h.runner.computed_tokens
    h.run_rounds(3)
    assert h.runner.computed_tokens == before
    h.resume("k")
    assert h.reply(keeping).failure.code == "pause_interrupted" and h.reply(waiting) is None
    h.transport.mute.clear()
    h.run_rounds(15)
    assert h.reply(waiting).failure is None and tokens_of(h) == [12] * 4 + [0] * 2


# --------------------------------------------------------------------------- renewal


def test_a_hold_stands_as_long_as_it_is_renewed():
    h = busy()
    h.pause(mode="keep", hold_id="mine", ttl_s=10.0)
    for _ in range(5):
        h.now += 8.0
        renewed = h.ask(m.RenewArgs("mine", 10.0)).result
        assert renewed["is_paused"] and renewed["hold"]["ttl_left_s"] == 10.0
    h.now += 10.0
    h.run_rounds()
    assert not h.status()["holds"]
    assert h.ask(m.RenewArgs("mine", 10.0)).failure.code == "hold_not_found"
    assert not h.status()["holds"], "a renewal never places a hold"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_renewal_changes_nothing_but_the_ttl(mode):
    h = busy()
    h.pause(rounds=200, mode=mode, hold_id="mine", admission="hold", ttl_s=10.0, clear_cache=True)
    h.add("late", [1, 2], max_tokens=3)
    h.run_rounds()
    fences = len(h.sent(m.Fence))
    before, computed, status = tokens_of(h), h.runner.computed_tokens, h.status()
    assert h.ask(m.RenewArgs("mine", 20.0)).failure is None
    h.run_rounds(3)
    assert len(h.sent(m.Fence)) == fences
    after = h.status()
    status["holds"][0].pop("ttl_left_s"), after["holds"][0].pop("ttl_left_s")
    assert after == status and tokens_of(h) == before and h.runner.computed_tokens == computed
    h.resume("mine")
    h.run_out()
    assert h.stream("late").tokens == expected_tokens([1, 2], 3)


def test_a_renewal_reaches_a_pause_that_still_drains():
    h = busy()
    call = call_pause(h, mode="wait", timeout_s=60.0, hold_id="mine", ttl_s=10.0)
    h.now += 8.0
    assert h.ask(m.RenewArgs("mine", 10.0)).result["state"] == "draining"
    h.now += 8.0
    h.run_rounds()
    assert h.status()["holds"] and (h.reply(call) is None or h.reply(call).failure is None)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e9, float("nan")])
def test_a_renewal_with_a_ttl_out_of_range_is_refused(ttl_s):
    h = Harness()
    h.pause(mode="keep", hold_id="mine", ttl_s=10.0)
    h.assert_refused(m.RenewArgs("mine", ttl_s), "ttl_s")
    assert h.status()["holds"][0]["ttl_left_s"] == 10.0


def test_a_hold_of_the_system_cannot_be_renewed():
    h = Harness(lost_commit=True)
    assert [hold["id"] for hold in h.status()["holds"]] == ["republish"]
    assert h.ask(m.RenewArgs("republish", 1.0)).failure.code == "hold_not_found"
    h.now += 100.0
    h.run_rounds()
    assert h.status()["holds"]
