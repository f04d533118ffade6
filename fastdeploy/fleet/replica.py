"""One engine of the fleet, as the gateway sees it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineError
from fastdeploy.core.process import VERSION
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator.known_messages import Known, cannot
from fastdeploy.inter_communicator.transport import Connector

logger = logging.getLogger(__name__)
TELLS = 2  # the first load that an engine tells after a choice may be that of before the request came
LOAD = ("running", "waiting", "available_gpu_block_num", "max_num_seqs")


class ReplicaState(Enum):
    """The states of a replica. STARTING: no engine was connected yet. JOINING: connected, and being brought to the
    fleet's state. MEMBER: gets requests, and takes part in every control call. DRAINING: a member that gets no new
    requests. FENCED: was connected, is cut off, and is being replaced. REMOVED: gone for good."""

    STARTING = "starting"
    JOINING = "joining"
    MEMBER = "member"
    DRAINING = "draining"
    FENCED = "fenced"
    REMOVED = "removed"


class ReplicaEvent(Enum):
    CONNECTED = "connected"
    JOINED = "joined"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    LOST = "lost"  # the connection ended, or the engine was silent
    FENCE = "fence"  # it missed a deadline, its state is not that of the fleet, or it has another endpoint now
    DEPOSED = "deposed"  # this gateway does not lead any more
    REMOVE = "remove"


S, E = ReplicaState, ReplicaEvent
TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (S.STARTING, E.CONNECTED): S.JOINING,
    (S.STARTING, E.LOST): S.STARTING,
    (S.STARTING, E.FENCE): S.FENCED,
    (S.FENCED, E.CONNECTED): S.JOINING,
    (S.FENCED, E.LOST): S.FENCED,
    (S.FENCED, E.FENCE): S.FENCED,
    (S.JOINING, E.JOINED): S.MEMBER,
    (S.JOINING, E.LOST): S.FENCED,
    (S.JOINING, E.FENCE): S.FENCED,
    (S.JOINING, E.DEPOSED): S.JOINING,
    (S.MEMBER, E.DRAIN): S.DRAINING,
    (S.MEMBER, E.LOST): S.FENCED,
    (S.MEMBER, E.FENCE): S.FENCED,
    (S.MEMBER, E.DEPOSED): S.JOINING,
    (S.DRAINING, E.DRAIN): S.DRAINING,
    (S.DRAINING, E.UNDRAIN): S.MEMBER,
    (S.DRAINING, E.LOST): S.FENCED,
    (S.DRAINING, E.FENCE): S.FENCED,
    (S.DRAINING, E.DEPOSED): S.JOINING,
    **{(state, E.REMOVE): S.REMOVED for state in S if state is not S.REMOVED},
}


class Promises:
    """The requests for which this gateway has chosen a replica, and which another one sends there (see homes.py), until
    the engine has told its load with them. choices, load: of these, as in Replica."""

    def __init__(self) -> None:
        self.choices = self.load = 0
        self._promises: deque[tuple[int, int, int]] = deque()

    def add(self, num_tells: int, choices: int, load: int) -> None:
        """Count a request. num_tells: how often the engine has told its load."""
        self._promises.append((num_tells, choices, load))
        self.choices += choices
        self.load += load

    def forget_told(self, num_tells: int) -> None:
        """Forget what the engine must have told by now."""
        while self._promises and num_tells >= self._promises[0][0] + TELLS:
            _, choices, load = self._promises.popleft()
            self.choices -= choices
            self.load -= load


class Replica:
    """One engine of the fleet. placement: where it is. connector: to its engine. client: of its engine; another one
    after each ``cut``. load: cost of the choices that run there for this gateway, in prompt tokens (see Router). slots:
    choices in one batch. max_waiting: choices that may wait there, as of its last engine. trust: the share of a
    session's prefix that is found there, from 0 to 1, as measured. weight_epoch, version: of the weights that it
    serves, as of the last answered call. report: its last answer to LeadArgs or FleetStateArgs. why: reason of the last
    loss, fence or failed join. drains: whether it shall get no new requests, also when it has joined again.
    lives: how often it was fenced or lost. unsettled: it was connected when this gateway began to lead, and has not
    joined since, so requests of other gateways may still run there. gateway: see messages.Hello. changed(replica):
    called after each change of the state. lost(replica, error): called when its engine is lost, after the change of the
    state and before its open requests fail.

    blocked: whether it cannot join as it is, and a restart would not help. software, knows, cannot: version of this
    package at the engine, the messages that it knows, and what this gateway knows and it does not."""

    def __init__(
        self,
        placement: Placement,
        connector: Connector,
        stall_s: float,
        changed: Callable[[Replica], None],
        lost: Callable[[Replica, EngineError], None] = lambda replica, error: None,
        gateway: str = "",
    ):
        self.placement = placement
        self.state = ReplicaState.STARTING
        self.why = ""
        self.load = 0
        self.slots = 0
        self.max_waiting = 0
        self.trust = 1.0
        self.weight_epoch = 0
        self.version = ""
        self.report: dict[str, Any] = {}
        self.blocked = False
        self.software = ""
        self.knows: Known = {}
        self.cannot: list[str] = []
        self.drains = False
        self.lives = 0
        self.unsettled = False
        self.failures = 0  # restarts in a row without a join
        self.idle = asyncio.Event()  # set while nothing of this gateway runs there
        self.idle.set()
        self._in_flight = 0
        self._stall_s = stall_s
        self._changed = changed
        self._on_lost = lost
        self._gateway = gateway
        self._client_number = 0
        self.client = self._new_client(connector)

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def boot_id(self) -> str:
        """The boot id of the engine to which this gateway is connected; "" = to none."""
        welcome = self.client.welcome
        return "" if welcome is None else welcome.boot_id

    @property
    def in_quorum(self) -> bool:
        """Whether control calls go to this replica."""
        return self.state in (ReplicaState.MEMBER, ReplicaState.DRAINING)

    @property
    def in_flight(self) -> int:
        """Choices that run there for this gateway."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, number: int) -> None:
        self._in_flight = number
        if number:
            self.idle.clear()
        else:
            self.idle.set()

    def advance(self, event: ReplicaEvent, why: str = "") -> None:
        """Change the state as TRANSITIONS says. Raises KeyError for an event that the state does not know."""
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if why:
            self.why = why
        if before is not self.state:
            self.lives += self.state is ReplicaState.FENCED
            self.unsettled = False
            level = logging.WARNING if self.state is ReplicaState.FENCED else logging.INFO
            logger.log(level, "replica %s: %s -> %s %s", self.name, before.value, self.state.value, why)
            self._changed(self)

    def cut(self, why: str) -> None:
        """Drop the connection at once. What is open fails with EngineDead, and nothing of the old connection is read
        any more. Advance the state first, so that the requests which fail are not routed here again."""
        self._client_number += 1
        self.client.cut(why)

    def connect_again(self, placement: Placement, connector: Connector) -> None:
        """Begin to connect to the engine that follows the one that was cut off."""
        self.placement = placement
        self.client = self._new_client(connector)
        self.client.start()

    def _new_client(self, connector: Connector) -> EngineClient:
        self._client_number += 1
        number = self._client_number
        self.promises = Promises()

        def connected() -> None:
            if number == self._client_number:  # else a late event of an old connection
                info, welcome = self.client.model_info, self.client.welcome
                assert welcome is not None
                self.blocked = False
                self.software, self.knows = welcome.software, welcome.knows
                self.cannot = cannot(welcome.knows) if welcome.software else []
                self.slots, self.max_waiting, self.trust = info["max_num_seqs"], info["max_waiting"], 1.0
                self.advance(ReplicaEvent.CONNECTED)

        def lost(error: EngineError) -> None:
            if number == self._client_number:
                self.report = {}
                self.advance(ReplicaEvent.LOST, error.message)
                self._on_lost(self, error)

        return EngineClient(
            connector,
            self._stall_s,
            kills_stalled=False,
            on_connected=connected,
            on_lost=lost,
            gateway=self._gateway,
        )

    def keep_report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Keep the answer to LeadArgs or FleetStateArgs, and return it."""
        self.report = report
        self.weight_epoch, self.version = report["weight_epoch"], report["version"]
        return report

    def describe(self) -> dict[str, Any]:
        """Return the replica's entry of GET /v1/replicas. "load" and "holds" are as of its last report."""
        label = {"version": self.version, "weight_epoch": self.weight_epoch}
        entry = describe(self.placement, self.state, self.why, self.report | label, self.in_flight, self.drains)
        return entry | {"software": self.software, "cannot": self.cannot}


def describe(
    placement: Placement,
    state: ReplicaState,
    why: str,
    report: Mapping[str, Any],
    in_flight: int | None = None,
    drains: bool = False,
) -> dict[str, Any]:
    """Return an entry of GET /v1/replicas. report: an answer to FleetStateArgs, or {}. in_flight: choices that run
    there; None = as the report says."""
    load = {field: report.get(field) for field in LOAD}
    return {
        "name": placement.name,
        "url": placement.url,
        "host": placement.host,
        "state": state.value,
        "why": why,
        "version": report.get("version", ""),
        "weight_epoch": report.get("weight_epoch", 0),
        "in_flight": (load["running"] or 0) + (load["waiting"] or 0) if in_flight is None else in_flight,
        "drains": drains,
        "load": load,
        "holds": report.get("holds", []),
        "settings": placement.settings,
        "software": VERSION,
        "cannot": [],
    }
