"""What is armed, and what has happened: kept in a file, since faults kill the process that keeps it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fastdeploy.core.errors import InvalidField
from fastdeploy.faults.rules import CONDITIONS, MAX_RULES, Rule, Schedule, acts_on
from fastdeploy.faults.table import FAULTS, Place

logger = logging.getLogger(__name__)
MAX_KEPT = 1000  # entries about what happened
METRIC, TEXT = "fastdeploy:faults_injected", "Faults that happened on request"
STATE = "state.json"


class Happening(msgspec.Struct, kw_only=True):
    """A fault that was decided for one request. number: of the request, as its rule counts them. acted: it happened;
    one that waits for a token may find that the request ends before. request_id: as the client knows it; "" = a
    request without. at: time.time()."""

    fault: str
    rule: str
    number: int
    path: str
    request_id: str = ""
    call: str = ""
    acted: bool = False
    at: float = 0.0


class State(msgspec.Struct, kw_only=True):
    """The content of the file. clock_s: how far the wall clocks are off, by process. num_armed: names rules."""

    rules: list[Rule] = []
    happened: list[Happening] = []
    counts: dict[str, int] = {}
    clock_s: dict[str, float] = {}
    num_armed: int = 0


class FaultBook(Collector):
    """The rules of one server, and what they did. folder: of the file; another process that serves in place of this one
    finds the file and goes on with it. released: set when something is disarmed, so that what hangs goes on."""

    def __init__(self, folder: str, schedule: Schedule | None = None):
        self._file = Path(folder, STATE)
        self.released = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None  # after the clocks have changed
        if self._file.exists():
            self.state = msgspec.json.decode(self._file.read_bytes(), type=State)
        else:
            self.state = State()
            if schedule is not None:
                self.arm(schedule)

    def save(self) -> None:
        """Write the file."""
        draft = self._file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self.state))
        os.replace(draft, self._file)

    # ------------------------------------------------------------------ arming

    def arm(self, schedule: Schedule) -> list[Rule]:
        """Arm all rules, or none. Raises InvalidField for a name that is armed, and for too many rules."""
        names = {rule.name for rule in self.state.rules}
        for rule in schedule.rules:
            if rule.name in names:
                raise InvalidField("name", f"{rule.name!r} is armed already: disarm it, or take another name")
            names |= {rule.name} - {""}
        if len(self.state.rules) + len(schedule.rules) > MAX_RULES:
            raise InvalidField("rules", f"expected at most {MAX_RULES} rules in all")
        now = time.time()
        for rule in schedule.rules:
            self.state.num_armed += 1
            rule.armed_at = now
            rule.name = rule.name or f"rule-{self.state.num_armed}"
        self.state.rules += schedule.rules
        self.save()
        return schedule.rules

    def disarm(self, name: str | None) -> list[str]:
        """Disarm the rule of this name, or all: then everything is as at the start, but for the counts. What hangs goes
        on. Return the names. Raises InvalidField for a name that is not armed."""
        names = [rule.name for rule in self.state.rules]
        if name is not None and name not in names:
            raise InvalidField("rule", f"expected one of {', '.join(names) or 'none: no rule is armed'}, got {name!r}")
        gone = names if name is None else [name]
        if name is None:
            self.state = State(counts=self.state.counts)
            self.changed()
        else:
            self.state.rules = [rule for rule in self.state.rules if rule.name != name]
        self.released.set()
        self.released = asyncio.Event()
        self.save()
        return gone

    # ------------------------------------------------------------------ deciding

    async def decide(
        self,
        place: Place,
        asked: Iterable[Rule],
        path: str,
        request_ids: Iterable[str] = (),
        call: str = "",
        version: Callable[[], Awaitable[str]] | None = None,
        fits: Callable[[Rule], bool] = lambda rule: True,
    ) -> list[tuple[Rule, Happening]]:
        """Return the faults that a request gets now. asked: rules of the request itself, which hold for it alone.
        version: asks for the label of the weights that the condition ``version`` is about. fits: a further condition,
        asked last."""
        ids = [name for name in request_ids if name]
        now = time.time()
        armed = [rule for rule in self.state.rules if acts_on(rule, place, call) and rule.fits(path, ids, call, now)]
        if version is not None and any(rule.conditions["version"] for rule in armed):
            label = await version()
            armed = [rule for rule in armed if rule.conditions["version"] in ("", label)]
        elif version is None:
            armed = [rule for rule in armed if not rule.conditions["version"]]
        armed = [rule for rule in armed if fits(rule)]
        own = [rule for rule in asked if acts_on(rule, place, call) and not rule.fired and fits(rule)]
        chosen = []
        for rule in (*own, *armed):
            number = rule.matched
            if rule.draw():
                happening = Happening(fault=rule.fault, rule=rule.name, number=number, path=path, call=call, at=now)
                happening.request_id = ids[0] if ids else ""
                self.state.happened = [*self.state.happened[1 - MAX_KEPT :], happening]
                chosen.append((rule, happening))
        if armed or own:
            self.save()
        return chosen

    def acted(self, happening: Happening) -> None:
        """Count a fault, just before it happens: the next moment may be the last one of this process."""
        if happening.acted:
            return
        happening.acted = True
        self.state.counts[happening.fault] = self.state.counts.get(happening.fault, 0) + 1
        logger.warning("fault %s (%s): %s %s", happening.fault, happening.rule, happening.path, happening.request_id)
        self.save()

    def set_clock(self, of: str, seconds: float) -> None:
        """Note that a clock is off by so much more."""
        self.state.clock_s[of] = self.state.clock_s.get(of, 0.0) + seconds
        self.save()
        self.changed()

    # ------------------------------------------------------------------ views

    def collect(self) -> list[Metric]:
        """Return the metric. Every fault has a value from the start."""
        family = CounterMetricFamily(METRIC, TEXT, labels=["fault"])
        for name in FAULTS:
            family.add_metric([name], self.state.counts.get(name, 0))
        return [family]

    def view(self) -> dict[str, Any]:
        """Return the reply of GET /v1/faults."""
        return {
            "armed": [rule.describe() for rule in self.state.rules],
            "happened": json.loads(msgspec.json.encode(self.state.happened)),
            "counts": self.state.counts,
            "faults": [fault.describe() for fault in FAULTS.values()],
            "conditions": [condition.describe() for condition in CONDITIONS],
        }
