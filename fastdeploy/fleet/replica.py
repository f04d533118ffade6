"""One engine of the fleet, as the gateway sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

from fastdeploy.client.connection import Connector
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineError
from fastdeploy.fleet.launcher import Placement

logger = logging.getLogger(__name__)


class ReplicaState(Enum):
    """STARTING: no engine is connected. JOINING: connected, and being brought to the fleet's state. MEMBER: gets
    requests, and takes part in every control call. DRAINING: a member that gets no new requests. FENCED: was a member,
    is cut off, and is being restarted. REMOVED: gone for good."""

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
    FENCE = "fence"  # it missed a deadline, or its state is not that of the fleet
    REMOVE = "remove"


S, E = ReplicaState, ReplicaEvent
TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (S.STARTING, E.CONNECTED): S.JOINING,
    (S.STARTING, E.LOST): S.STARTING,
    (S.FENCED, E.CONNECTED): S.JOINING,
    (S.FENCED, E.LOST): S.FENCED,
    (S.FENCED, E.FENCE): S.FENCED,
    (S.JOINING, E.JOINED): S.MEMBER,
    (S.JOINING, E.LOST): S.FENCED,
    (S.JOINING, E.FENCE): S.FENCED,
    (S.MEMBER, E.DRAIN): S.DRAINING,
    (S.MEMBER, E.LOST): S.FENCED,
    (S.MEMBER, E.FENCE): S.FENCED,
    (S.DRAINING, E.DRAIN): S.DRAINING,
    (S.DRAINING, E.UNDRAIN): S.MEMBER,
    (S.DRAINING, E.LOST): S.FENCED,
    (S.DRAINING, E.FENCE): S.FENCED,
    **{(state, E.REMOVE): S.REMOVED for state in S if state is not S.REMOVED},
}


class Replica:
    """One engine of the fleet. placement: where it is. client: of its engine. in_flight: choices that run there for
    this gateway. load: their cost, in prompt tokens (see Router). slots: choices in one batch. trust: the
    part of a session's prefix that is found there, from 0 to 1, as measured. adapters: names that are loaded; None =
    not known. weight_epoch: of the weights that it serves, as of the last answered call. why: reason of the last
    LOST or FENCE. changed(replica): called after each change of the state."""

    def __init__(self, placement: Placement, connector: Connector, stall_s: float, changed: Callable[[Replica], None]):
        self.placement = placement
        self.state = ReplicaState.STARTING
        self.why = ""
        self.in_flight = 0
        self.load = 0
        self.slots = 0
        self.trust = 1.0
        self.adapters: frozenset[str] | None = None
        self.weight_epoch = 0
        self.version = ""
        self._changed = changed
        self.client = EngineClient(
            connector, stall_s, kills_stalled=False, on_connected=self._connected, on_lost=self._lost
        )

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def in_quorum(self) -> bool:
        """Whether control calls go to this replica."""
        return self.state in (ReplicaState.MEMBER, ReplicaState.DRAINING)

    def advance(self, event: ReplicaEvent, why: str = "") -> None:
        """Change the state as TRANSITIONS says. Raises KeyError for an event that the state does not know."""
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if why:
            self.why = why
        if before is not self.state:
            level = logging.WARNING if self.state is ReplicaState.FENCED else logging.INFO
            logger.log(level, "replica %s: %s -> %s %s", self.name, before.value, self.state.value, why)
            self._changed(self)

    def _connected(self) -> None:
        self.slots, self.trust = self.client.model_info["max_num_seqs"], 1.0
        if self.state in (ReplicaState.STARTING, ReplicaState.FENCED):
            self.advance(ReplicaEvent.CONNECTED)

    def _lost(self, error: EngineError) -> None:
        if self.state is not ReplicaState.REMOVED:
            self.advance(ReplicaEvent.LOST, error.message)

    def describe(self) -> dict[str, Any]:
        """Return the replica's entry of GET /v1/replicas, without what only its engine knows."""
        return {
            "name": self.name,
            "url": self.placement.url,
            "host": self.placement.host,
            "state": self.state.value,
            "why": self.why,
            "version": self.version,
            "weight_epoch": self.weight_epoch,
            "in_flight": self.in_flight,
        }
