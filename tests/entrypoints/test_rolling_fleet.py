"""The parent in a rolling change, with children that only say that they are alive: a successor gets the name of a
gateway, and an old one leaves when the successor serves, or gets its name back when the successor cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.process_tree import FAILED
from fastdeploy.entrypoints.roll import Settings
from fastdeploy.entrypoints.rolling_fleet import RollingFleet
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Action, Answer, Ask, Roll, RollPhase

ROOT = Path(__file__).parents[2]
GATEWAYS = ["gateway-0", "gateway-1"]


class ScriptedFleet(RollingFleet):
    """A fleet of one replica and two gateways. good: whether new gateways become ready; else they end. ends: name and
    status of each child that has ended. phases: of the change. Stops when the change has ended."""

    def __init__(self, good: bool):
        serve = ServeConfig(model="tiny", served_model_name="tiny", port=0)
        settings = Settings(EngineConfig(model="tiny"), serve, FleetConfig(fleet_id="fleet-1"))
        super().__init__(*settings, 1, first_delay_s=0.01, num_gateways=2, reread=lambda given: settings)
        self._good = good
        self.ends: list[tuple[str, int]] = []
        self.answers: list[Answer | None] = []
        self.phases: list[str] = []
        self.pids: list[dict[str, int]] = []  # of the gateways, before and after the change
        self._call_later("test", 30.0, lambda: self._stop(FAILED))
        self._call_later("begin", 0.0, self._begin_when_all_run)

    @property
    def roll(self) -> Roll | None:
        return self._book.roll

    def _make(self, name: str) -> Child:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self._book.number(name)
        child = Child(name, "support.beating_child", ["gentle"], environment=environment, whole_group=True)
        if self.roll is not None:
            if self._good or name == "replica-0" or self.roll.why:
                self._call_later(f"ready {child.pid}", 0.05, lambda: self._become_ready(child))
            else:
                child.signal(signal.SIGTERM)
        return child

    def _become_ready(self, child: Child) -> None:
        for event in ("up", "ready") if child.name in GATEWAYS else ("ready",):
            self._on_event(child, {"event": event})

    def _begin_when_all_run(self) -> None:
        for child in list(self._children.values()):
            self._become_ready(child)
        self._note_pids()
        self._ask(Ask(1, Action.ROLL))
        self._ask(Ask(2, Action.REPLICAS_REPLACED))

    def _ask(self, ask: Ask) -> None:
        self.answers.append(self._handle(GATEWAYS[0], ask))

    def _note_pids(self) -> None:
        self.pids.append({name: self._children[name].pid for name in GATEWAYS})

    def _send_placements(self) -> None:
        super()._send_placements()
        assert self.roll is not None
        self.phases.append(self.roll.phase.value)
        if self.roll.why and self.roll.phase is RollPhase.REPLICAS:  # the gateway that leads has looked again
            self._call_later("again", 0.1, lambda: self._ask(Ask(3, Action.REPLICAS_REPLACED)))
        if not self.roll.runs:
            self._note_pids()
            self._stop(0)

    def _on_end(self, child: Child, status: int) -> None:
        self.ends.append((child.name, status))
        super()._on_end(child, status)


def run(good: bool) -> Any:
    fleet = ScriptedFleet(good)
    assert fleet.run() == 0
    return fleet


def test_the_successor_of_each_gateway_serves_before_the_old_one_is_told_to_leave():
    fleet = run(good=True)
    before, after = fleet.pids
    assert [answer.error for answer in fleet.answers] == ["", ""]
    assert not set(before.values()) & set(after.values())
    assert fleet.ends == [(f"{name} (process {before[name]})", -signal.SIGUSR1) for name in GATEWAYS]
    assert fleet.phases[-1] == "done"


def test_a_gateway_whose_successor_does_not_serve_stays():
    fleet = run(good=False)
    before, after = fleet.pids
    assert before == after and fleet.ends == [("gateway-0", -signal.SIGTERM)]
    assert fleet.phases[-1] == "failed" and "gateway-0 cannot be started with the new settings" in fleet.roll.why
