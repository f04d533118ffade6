"""Anonymous holds with a name that the gateway of a fleet has given, so that they have one name on all engines."""

from __future__ import annotations

import pytest

from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.inter_communicator import messages as m
from support.harness import Harness

SCOPES = ["engine", adapter_scope("a")]


def harness() -> Harness:
    h = Harness()
    h.load_adapter("a", 1)
    return h


def holds(h: Harness) -> list[tuple[str, bool, str]]:
    found = h.ask(m.FleetStateArgs()).result["holds"]
    return [(hold["id"], hold["named"], hold["mode"]) for hold in found]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_resume_without_a_name_releases_the_hold_and_leaves_named_ones(scope):
    h = harness()
    reply = h.pause(mode="keep", hold_id="anonymous-7-f", anonymous=True, scope=scope)
    assert (reply.result["hold"]["id"], reply.result["hold"]["named"]) == ("anonymous-7-f", False)
    h.pause(mode="keep", hold_id="mine", scope=scope)
    result = h.ask(m.ResumeArgs(scope=scope)).result
    assert (result["released"], result["still_held_by"]) == (["anonymous-7-f"], ["mine"])


@pytest.mark.parametrize("scope", SCOPES)
def test_the_same_name_is_the_same_hold_made_stronger_and_may_be_released_and_renewed_by_name(scope):
    h = harness()
    h.pause(mode="keep", hold_id="n", anonymous=True, scope=scope)
    h.pause(mode="abort", hold_id="n", anonymous=True, scope=scope, ttl_s=5.0)
    assert holds(h) == [("n", False, "abort")]
    assert h.ask(m.RenewArgs("n", 50.0, scope)).result["hold"]["ttl_left_s"] == 50.0
    assert h.ask(m.ResumeArgs("n", scope)).result["released"] == ["n"] and holds(h) == []


def test_a_caller_that_names_the_hold_owns_it_and_no_later_pause_takes_the_name_away():
    h = harness()
    h.pause(mode="keep", hold_id="n", anonymous=True)
    h.pause(mode="keep", hold_id="n")
    assert holds(h) == [("n", True, "keep")]
    h.pause(mode="keep", hold_id="n", anonymous=True)
    assert holds(h) == [("n", True, "keep")] and h.resume().result["released"] == []


def test_a_name_that_the_engine_would_give_is_not_given_twice():
    h = harness()
    h.pause(mode="keep", hold_id="anonymous-1", anonymous=True)
    assert h.pause(mode="keep").result["hold"]["id"] == "anonymous-2"
    assert len(holds(h)) == 2 and h.resume().result["status"] == "running"


def test_a_reset_releases_the_hold_and_a_ttl_ends_it():
    h = harness()
    h.pause(mode="keep", hold_id="n", anonymous=True, ttl_s=5.0)
    h.now += 5.1
    h.run_rounds()
    assert holds(h) == []
    h.pause(mode="keep", hold_id="n", anonymous=True)
    assert h.ask(m.ResetArgs()).result["released"] == ["n"]


def test_a_reserved_name_is_refused():
    harness().assert_refused(m.PauseArgs("keep", hold_id="sleep", anonymous=True), "hold_id")
