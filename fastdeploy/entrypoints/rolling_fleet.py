"""The parent of a fleet whose processes are replaced by ones with other settings, or another version of this package.

Replicas come first: the gateway that leads says which one, and when (fleet/roll.py). Then this parent replaces the
gateways: the successor of each gets the same sockets, and serves before the old one is told to leave
(entrypoints/leaving.py).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.fleet import GATEWAY_STALLS, Fleet
from fastdeploy.entrypoints.leaving import LEAVE
from fastdeploy.fleet.launcher import Action, Answer, Ask, RollPhase

logger = logging.getLogger(__name__)


class RollingFleet(Fleet):
    """See the module and Fleet."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._replacing: dict[str, tuple[str, Ask]] = {}  # replicas that end to be started anew -> who asked for it
        self._refusals: dict[str, str] = {}  # why a child ends that cannot serve with its settings
        self._old: dict[str, str] = {}  # gateway whose successor has its name, and does not serve yet -> its new name
        self._leaving: set[str] = set()  # names of old gateways, also of those in _old

    def _handle(self, gateway: str, ask: Ask) -> Answer | None:
        if self._stopping or (ask.action is Action.REPLACE and ask.name not in self._replicas):
            return super()._handle(gateway, ask)
        match ask.action:
            case Action.ROLL:
                return self._begin_roll(ask)
            case Action.REPLACE:
                return self._replace(gateway, ask)
            case Action.GO_BACK:
                self._go_back(ask.why)
            case Action.REPLICAS_REPLACED:
                self._enter_gateways()
            case _:
                return super()._handle(gateway, ask)
        return Answer(ask.ask_id, ask.name)

    def _begin_roll(self, ask: Ask) -> Answer:
        try:
            roll = self._book.begin(ask.given, ask.drain_s)
        except FastDeployError as error:
            return Answer(ask.ask_id, error=error.message)
        logger.info("rolling change to settings %d: %s", roll.settings, roll.given)
        self._send_placements()
        return Answer(ask.ask_id, roll=roll)

    def _go_back(self, why: str) -> None:
        """Go back to the settings from before, for those processes too that have the new ones already."""
        logger.error("the rolling change goes back: %s", why)
        self._book.go_back(why)
        self._send_placements()

    # ------------------------------------------------------------------ replicas

    def _replace(self, gateway: str, ask: Ask) -> Answer | None:
        """End the replica, and start it with the present settings. The answer follows its end."""
        name = ask.name
        self._book.renew(name)
        self._book.trials.add(name)
        self._send_placements()
        if (child := self._children.get(name)) is None:
            self._due[name] = time.monotonic()
            return Answer(ask.ask_id, name)
        self._replacing[name] = gateway, ask
        child.signal(signal.SIGTERM)
        why = f"it is being replaced, and has not ended within {self._shutdown_s:g} s"
        self._kill_after(child, self._shutdown_s, why)
        return None

    def _answer_replacing(self, name: str) -> None:
        gateway, ask = self._replacing.pop(name)
        self._links.send(gateway, Answer(ask.ask_id, name))

    def _remove(self, name: str) -> None:
        if name in self._replacing:
            self._answer_replacing(name)
        super()._remove(name)

    def _trial_ended(self, name: str, status: int) -> None:
        """Start a child with the old settings, since it did not serve with the new ones."""
        why = self._refusals.pop(name, f"its process ended with status {status}")
        self._book.trials.discard(name)
        self._go_back(f"{name} cannot be started with the new settings: {why}")
        self._book.renew(name)
        self._send_placements()

    # ------------------------------------------------------------------ gateways

    def _enter_gateways(self) -> None:
        if self._book.roll is not None and self._book.roll.phase is RollPhase.REPLICAS:
            self._book.enter(RollPhase.GATEWAYS)
            self._send_placements()
            self._call_later("roll", 0.0, self._next_gateway)  # the gateway that asked gets its answer first

    def _next_gateway(self) -> None:
        """Replace the next gateway that has other settings, once the last one serves. Without one, the change is done
        when all old ones have left."""
        roll = self._book.roll
        if roll is None or roll.phase is not RollPhase.GATEWAYS or self._old:
            return
        for name in self._servers:
            if self._book.number(name) != roll.settings:
                self._start_successor(name)
                return
        if not self._leaving:
            self._book.enter(RollPhase.DONE)
            self._send_placements()

    def _start_successor(self, name: str) -> None:
        """Start a gateway beside the one of this name, which gets another name."""
        self._book.renew(name)
        if (old := self._children.pop(name, None)) is None:  # it is being started again anyway
            self._next_gateway()
            return
        self._timers.pop(name, None)
        self._book.trials.add(name)
        old.name = f"{name} (process {old.pid})"
        self._children[old.name] = old
        self._links.rename(name, old.name)
        self._old[name] = old.name
        self._leaving.add(old.name)
        self._start(name)

    def _successor_serves(self, name: str) -> None:
        if (old := self._children.get(self._old.pop(name))) is not None:
            old.signal(LEAVE)
        self._next_gateway()

    def _successor_ended(self, name: str, status: int) -> None:
        """Let the old gateway have its name again, since its successor cannot serve."""
        self._links.close(name)
        self._trial_ended(name, status)
        old = self._children.pop(self._old.pop(name), None)
        if old is None:
            self._due[name] = time.monotonic()
            return
        self._leaving.discard(old.name)
        self._timers.pop(old.name, None)
        self._links.rename(old.name, name)
        old.name = name
        self._children[name] = old
        self._let_in(name)

    # ------------------------------------------------------------------ events of children

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        name = child.name
        match event["event"]:
            case "alive" if name in self._replacing:
                return  # it shall end, and has another timer
            case kind if name in self._leaving:
                if kind == "alive":
                    self._expect_life(child, GATEWAY_STALLS)
                return
            case "refused":
                self._refusals[name] = event["why"]
            case "ready" | "serving":
                self._book.trials.discard(name)
        super()._on_event(child, event)
        if event["event"] == "ready" and name in self._old:
            self._successor_serves(name)

    def _on_end(self, child: Child, status: int) -> None:
        name = child.name
        if name in self._leaving:
            self._links.close(name)
            self._leaving.discard(name)
            self._book.forget(name)
            self._next_gateway()
        elif name in self._replacing:
            self._answer_replacing(name)
            self._due[name] = time.monotonic()
        elif name in self._old:
            self._successor_ended(name, status)
        elif name in self._book.trials and name in self._replicas:
            self._trial_ended(name, status)
            self._due[name] = time.monotonic()
        else:
            super()._on_end(child, status)

    def _next_to_stop(self) -> Iterable[Child]:
        gateways = [child for child in self._children.values() if child.name in (*self._servers, *self._leaving)]
        return gateways or self._children.values()
