"""The parent of a fleet, with children that only say that they are alive: stopped ones, late ones, killed gateways."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.entrypoints import fleet as fleet_module
from fastdeploy.entrypoints import process_tree
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.fleet import Fleet
from fastdeploy.entrypoints.gateway_config import GATEWAY_STALLS
from fastdeploy.entrypoints.process_tree import FAILED, LATE_TIMER_S, MAX_FAILED_STARTS
from fastdeploy.fleet.config import FleetConfig

ROOT = Path(__file__).parents[2]
REPLICA, GATEWAY = "replica-0", "gateway-0"
Step = Callable[["ScriptedFleet", Child], None]


class ScriptedFleet(Fleet):
    """A fleet whose children are beating_child. on_alive: called after each "alive" of the child ``watched``; those of
    others do not count. how: see beating_child.

    ends: the name and status of each child that has ended. Ends with status FAILED if the test does not stop it."""

    def __init__(
        self,
        on_alive: Step,
        stall_s: float = 60.0,
        shutdown_s: float = 60.0,
        how: str = "gentle",
        watched: str = REPLICA,
        gateways: int = 1,
    ):
        serve = ServeConfig(model="tiny", served_model_name="tiny", port=0, stall_s=stall_s, shutdown_s=shutdown_s)
        settings = EngineConfig(model="tiny"), serve, FleetConfig(fleet_id="fleet-1")
        super().__init__(*settings, 1, first_delay_s=0.01, num_gateways=gateways)
        self._on_alive = on_alive
        self._how = how
        self._watched = watched
        self.starts: list[str] = []
        self.ends: list[tuple[str, int]] = []
        self.removed = False
        self._call_later("test", 30.0, lambda: self._stop(FAILED))

    def _make(self, name: str) -> Child:
        self.starts.append(name)
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        return Child(name, "support.beating_child", [self._how], environment=environment, whole_group=True)

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        if child.name == self._watched:
            super()._on_event(child, event)
            self._on_alive(self, child)

    def _on_end(self, child: Child, status: int) -> None:
        self.ends.append((child.name, status))
        super()._on_end(child, status)

        if self.removed:
            self.end()

    @property
    def gateway(self) -> Child | None:
        return self._children.get(GATEWAY)

    @property
    def serving(self) -> set[str]:
        """The gateways that get new connections."""
        return set(self._serving)

    @property
    def announced(self) -> bool:
        return self._announced

    def soon(self, action: Callable[[], object]) -> None:
        """Call ``action`` after the timers that are due."""
        self.later(0.0, action)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._call_later("later", seconds, action)

    def become_ready(self) -> None:
        for child in self._children.values():
            for event in ("up", "ready") if child.name in self._servers else ("ready",):
                super()._on_event(child, {"event": event})

    def end(self) -> None:
        self._stop(0)

    def remove(self, name: str) -> None:
        """Remove a replica. The fleet stops after its end."""
        self.removed = True
        self._remove(name)


@pytest.fixture
def jump(monkeypatch) -> Callable[[float], None]:
    """Return ``jump(seconds)``: sets the clock of the parent forward, as if it had stood still for so long."""
    offsets = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(offsets))
    monkeypatch.setattr(process_tree, "time", clock)
    return offsets.append


@pytest.mark.parametrize("name", [REPLICA, GATEWAY])
def test_a_replica_or_gateway_whose_process_is_stopped_is_killed_and_started_again(name):
    def step(fleet: ScriptedFleet, child: Child) -> None:
        if fleet.starts.count(name) > 1:
            fleet.end()
        else:
            fleet.become_ready()
            os.kill(child.pid, signal.SIGSTOP)

    fleet = ScriptedFleet(step, stall_s=0.3 if name == REPLICA else 0.3 / GATEWAY_STALLS, watched=name)
    assert fleet.run() == 0
    assert fleet.ends == [(name, -signal.SIGKILL)]


def test_what_a_replica_said_while_the_parent_was_busy_counts(jump):
    num_beats = 0

    def step(fleet: ScriptedFleet, child: Child) -> None:
        nonlocal num_beats
        num_beats += 1
        if num_beats == 1:
            assert select.select([child.events.fd], [], [], 30)[0], "it says more"
            jump(10.0 + LATE_TIMER_S / 2)
        elif num_beats == 4:
            fleet.end()

    fleet = ScriptedFleet(step, stall_s=10.0)
    assert fleet.run() == 0 and fleet.ends == []


def test_a_parent_that_stood_still_gives_a_silent_replica_its_time_again(jump):
    num_beats = 0

    def step(fleet: ScriptedFleet, child: Child) -> None:
        nonlocal num_beats
        num_beats += 1
        if num_beats == 1:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            child.events.read()
            jump(20.0)
            fleet.soon(lambda: child.signal(signal.SIGCONT))  # after the timer of the replica
        elif num_beats == 4:
            fleet.end()

    fleet = ScriptedFleet(step, stall_s=10.0)
    assert fleet.run() == 0 and fleet.ends == []


@pytest.mark.parametrize("how", ["stopped", "stubborn"])
def test_a_removed_replica_that_does_not_end_is_killed(how):
    def step(fleet: ScriptedFleet, child: Child) -> None:
        if fleet.removed:
            return
        if how == "stopped":
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        fleet.remove(REPLICA)

    fleet = ScriptedFleet(step, shutdown_s=0.2, how="stubborn" if how == "stubborn" else "gentle")
    fleet.run()
    assert fleet.ends == [(REPLICA, -signal.SIGKILL)] and fleet.starts.count(REPLICA) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_gateways_that_are_killed_before_they_are_ready_do_not_end_the_fleet_but_those_that_fail_do(how, monkeypatch):
    monkeypatch.setattr(fleet_module, "MAX_GATEWAY_DELAY_S", 0.01)

    def step(fleet: ScriptedFleet, child: Child) -> None:
        if not fleet.announced:
            fleet.become_ready()
        if fleet.starts.count(GATEWAY) > 10:
            fleet.end()
        elif fleet.gateway is not None:
            fleet.gateway.signal(how)

    fleet = ScriptedFleet(step)
    status = fleet.run()
    assert REPLICA not in dict(fleet.ends)
    if how == signal.SIGKILL:
        assert status == 0 and len(fleet.ends) == 10
    else:
        assert status == FAILED and len(fleet.ends) == 1 + MAX_FAILED_STARTS, "the first one was ready"


def test_a_gateway_that_dies_is_replaced_alone_and_others_get_the_new_connections_until_then(monkeypatch):
    monkeypatch.setattr(fleet_module, "QUIET_S", 0.05)  # less than the start of a process takes
    seen: list[set[str]] = []

    def step(fleet: ScriptedFleet, child: Child) -> None:
        if not fleet.announced:
            fleet.become_ready()
            seen.append(fleet.serving)
            child.kill()
        elif fleet.ends and len(seen) == 1:  # the new one speaks
            seen.append(fleet.serving)
            fleet.become_ready()
            seen.append(fleet.serving)
            fleet.later(0.5, fleet.end)

    fleet = ScriptedFleet(step, watched=GATEWAY, gateways=2)
    assert fleet.run() == 0 and fleet.ends == [(GATEWAY, -signal.SIGKILL)]
    assert seen == [{"gateway-0", "gateway-1"}, {"gateway-1"}, {"gateway-0", "gateway-1"}]


def test_a_silent_gateway_gets_no_new_connections_until_it_speaks_again(monkeypatch):
    monkeypatch.setattr(fleet_module, "QUIET_S", 0.3)
    seen: list[set[str]] = []

    def look(fleet: ScriptedFleet, child: Child) -> None:
        if child.name in fleet.serving:
            fleet.later(0.05, lambda: look(fleet, child))
        else:
            seen.append(fleet.serving)
            child.signal(signal.SIGCONT)

    def step(fleet: ScriptedFleet, child: Child) -> None:
        if not fleet.announced:
            fleet.become_ready()
            os.kill(child.pid, signal.SIGSTOP)
            fleet.later(0.05, lambda: look(fleet, child))
        elif seen:
            seen.append(fleet.serving)
            fleet.end()

    fleet = ScriptedFleet(step, watched="gateway-1", gateways=2)
    assert fleet.run() == 0 and fleet.ends == []
    assert seen == [{"gateway-0"}, {"gateway-0", "gateway-1"}]


def test_a_gateway_that_cannot_start_does_not_end_a_fleet_with_another_one(monkeypatch):
    monkeypatch.setattr(fleet_module, "MAX_GATEWAY_DELAY_S", 0.01)

    def step(fleet: ScriptedFleet, child: Child) -> None:
        if not fleet.announced:
            fleet.become_ready()
        if len(fleet.ends) > MAX_FAILED_STARTS and fleet.gateway is None:
            fleet.end()
        elif fleet.gateway is not None:
            fleet.gateway.signal(signal.SIGTERM)

    fleet = ScriptedFleet(step, gateways=2)
    assert fleet.run() == 0 and {name for name, _ in fleet.ends} == {GATEWAY}
