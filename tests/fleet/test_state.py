"""The things of a fleet, while calls on them overlap."""

from __future__ import annotations

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.state import FleetAdapter, FleetState, OverlappingCalls
from fastdeploy.inter_communicator.messages import LoadAdapterArgs


def adapter(name: str, epoch: int) -> FleetAdapter:
    return FleetAdapter(LoadAdapterArgs(name, FolderSource("/a"), path="/a", version="1"), epoch, "f")


def test_what_stands_follows_each_end_of_each_call() -> None:
    calls: OverlappingCalls[str, str] = OverlappingCalls({"a": "first"})
    calls.place("a", "second")
    removals = calls.remove(lambda key, value: value == "second")
    assert calls.standing == {}
    calls.place("a", "third")
    assert calls.standing == {"a": "third"} and calls.before("a", "third") is None
    calls.fail("a", "third")
    assert calls.standing == {}
    calls.fail("a", removals["a"])
    assert calls.standing == {"a": "second"} and calls.before("a", "second") == "first"
    calls.fail("a", "second")
    assert calls.standing == {"a": "first"}
    calls.succeed("a", calls.remove(lambda key, value: True)["a"])
    assert calls.standing == {}
    calls.place("a", "fourth")
    calls.forget("a")
    assert calls.standing == {}


def test_adapters_are_not_listed_anew_for_each_question() -> None:
    """Each request that names an adapter asks, and a reset and a join ask for each adapter. With a list made anew for
    each question, a reset of 16384 adapters would keep the gateway's loop busy for some 48 s (from 300 of them)."""
    state = FleetState()
    for epoch in range(1, 5):
        state.adapter_calls.place(f"a{epoch}", adapter(f"a{epoch}", epoch))
    adapters, holds = state.adapters, state.holds
    assert state.adapters is adapters and state.holds is holds
    state.unload("a2")
    assert list(adapters) == ["a1", "a3", "a4"] and state.past_adapter_epoch == 2
