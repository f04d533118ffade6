"""What the gateway that leads tells the others of the fleet, and what it knows of them.

A **view** names the replicas that take requests, with the lives of their engines. Views are numbered within a term. A
gateway that follows asks for the next view (FollowArgs), and acknowledges the last one by that. It sends new requests
only as long as its view is valid: for ``fence_after_s`` after it asked. So the gateway that leads can wait until every
other one has a view, or has none any more (``caught_up``), and that takes no longer than ``fence_after_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from fastdeploy.core.errors import NotLeader
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

POLLS = 5  # in the time for which a view is valid, if nothing changes
PROBE_S = 0.05  # between two looks at whether a gateway that is waited for has ended
IN_VIEW = (ReplicaState.JOINING, ReplicaState.MEMBER, ReplicaState.DRAINING)


class ReplicaView(msgspec.Struct, frozen=True, array_like=True):
    """A replica that is connected to the gateway that leads. boot_id: of its engine. lives: how often it was fenced or
    lost in this term. A gateway that follows has nothing to do with another boot_id, nor, in the same term, with what
    it has got in an earlier life. weight_epoch, version: of the weights that serve there."""

    boot_id: str
    lives: int
    state: ReplicaState
    drains: bool
    weight_epoch: int
    version: str


class FleetView(msgspec.Struct, frozen=True):
    """See the module. boot_id: of the fleet. replicas: by name. adapters: adapter_epoch by name. gateways: addresses of
    all. least_epoch: a request of a session may get no older weights from now on, unless it is stale_ok."""

    term: int
    number: int
    boot_id: str
    replicas: dict[str, ReplicaView]
    adapters: dict[str, int]
    gateways: list[str]
    least_epoch: int = 0


NO_VIEW = FleetView(0, 0, "", {}, {}, [])


@dataclass
class Follower:
    """A gateway that follows, or that may follow. acknowledged: number of its view. until: time on the event loop's
    clock at which its view is certainly invalid."""

    acknowledged: int
    until: float


class Views:
    """The views of this gateway, while it leads. address: of this gateway; "" = it is the only one. replicas: by name.
    state: of the fleet. probe: finds out which gateways have ended, see Peers."""

    def __init__(
        self,
        config: FleetConfig,
        address: str,
        replicas: dict[str, Replica],
        state: FleetState,
        probe: Callable[[], None] = lambda: None,
    ):
        self._valid_s = config.fence_after_s
        self._address = address
        self._replicas = replicas
        self._state = state
        self._probe = probe
        self._followers: dict[str, Follower] = {}
        self._changed = asyncio.Event()  # replaced by each new view
        self._acknowledged = asyncio.Event()
        self._publishing: asyncio.Handle | None = None
        self.view = NO_VIEW
        self.why = "it does not lead yet"  # why there is no view

    # ------------------------------------------------------------------ the gateway that leads

    def begin(self, term: int, gateways: Collection[str]) -> None:
        """Begin to lead. gateways: those that the engines know. Each may have a view of the gateway that led before."""
        until = asyncio.get_running_loop().time() + self._valid_s
        self._followers = {gateway: Follower(0, until) for gateway in gateways if gateway != self._address}
        self.why = ""
        self.view = msgspec.structs.replace(NO_VIEW, term=term)
        self.publish()

    def end(self, why: str) -> None:
        """Lead no more."""
        self.why, self._followers = why, {}
        self._wake()

    @property
    def has_followers(self) -> bool:
        """Whether there is another gateway that may have a view."""
        return bool(self._followers)

    def changed(self) -> None:
        """Tell the others soon: something that a view has may have changed."""
        if self._followers and self._publishing is None and not self.why:
            self._publishing = asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        """Make a new view, if anything has changed."""
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        if self.why:
            return
        now = self._now(self.view.number)
        if now != self.view:
            self.view = msgspec.structs.replace(now, number=self.view.number + 1)
            self._wake()

    async def caught_up(self) -> None:
        """Return when no other gateway has an older view than that of now."""
        if not self._followers:
            return
        self.publish()
        number, now = self.view.number, asyncio.get_running_loop().time
        while late := [f for f in self._followers.values() if f.acknowledged < number]:
            if (left_s := min(follower.until for follower in late) - now()) <= 0:
                self._forget_silent()
                continue
            self._acknowledged.clear()
            try:
                async with asyncio.timeout(min(left_s, PROBE_S)):
                    await self._acknowledged.wait()
            except TimeoutError:
                self._probe()

    def gone(self, gateway: str) -> None:
        """Forget a gateway that has ended."""
        if self._followers.pop(gateway, None) is not None:
            self._acknowledged.set()
            self.changed()

    async def poll(self, args: m.FollowArgs) -> dict[str, Any]:
        """Answer a gateway that follows."""
        self._require()
        loop = asyncio.get_running_loop()
        known = args.after if args.term == self.view.term else 0
        follower = self._followers.setdefault(args.gateway, Follower(0, loop.time()))
        follower.acknowledged = known
        self._acknowledged.set()
        if not known:
            self.publish()
        elif self.view.number <= known:
            try:
                async with asyncio.timeout(self._valid_s / POLLS):
                    await self._changed.wait()
            except TimeoutError:
                self._forget_silent()
            self._require()
        self._followers.setdefault(args.gateway, follower).until = loop.time() + self._valid_s
        newer = self.view.number > known or self.view.term != args.term
        return {"view": msgspec.to_builtins(self.view) if newer else None}

    # ------------------------------------------------------------------ inside

    def _require(self) -> None:
        if self.why:
            raise NotLeader(f"this gateway does not lead: {self.why}", began=False)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._acknowledged.set()

    def _forget_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        for gateway in [gateway for gateway, follower in self._followers.items() if follower.until <= now]:
            self.gone(gateway)

    def _now(self, number: int) -> FleetView:
        replicas = {}
        for replica in self._replicas.values():
            welcome = replica.client.welcome
            if replica.state in IN_VIEW and welcome is not None:
                replicas[replica.name] = ReplicaView(
                    welcome.boot_id,
                    replica.lives,
                    replica.state,
                    replica.drains,
                    replica.weight_epoch,
                    replica.version,
                )
        adapters = {name: adapter.epoch for name, adapter in self._state.adapters.items()}
        gateways = sorted([self._address, *self._followers])
        return FleetView(
            self.view.term, number, self._state.boot_id, replicas, adapters, gateways, self.view.least_epoch
        )
