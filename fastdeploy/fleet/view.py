"""What the gateway that leads tells the others of the fleet, and what it knows of them.

A **view** names the replicas that take requests, with the lives of their engines. Views are numbered within a term. A
gateway that follows asks for the next view (FollowArgs), and acknowledges the last one by that. It sends new requests
only as long as its view is valid: for ``fence_after_s`` after it asked. So the gateway that leads can wait until every
other one has a view, or has none any more (``caught_up``), and that takes no longer than ``fence_after_s``. It does so

- before a call is answered: what it has fenced reaches nobody any more, and the others know the new state,
- before new weights are committed: from then on no gateway sends a request of a session to older weights, so no client
  sees version v+1 and then v through two gateways (``least_epoch``),
- before a call that ends requests is sent to the engines, and after it (``endings``): see fleet/endings.py.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from fastdeploy.core.errors import NotLeader
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.endings import Ended
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

POLLS = 5  # in the time for which a view is valid, if nothing changes
PROBE_S = 0.05  # between two looks at whether a gateway that is waited for has ended
MAX_LATE_ENDINGS = 64  # for gateways that were silent while the calls were made
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


class EndingView(msgspec.Struct, frozen=True, array_like=True):
    """A call that ends requests. at: time.time() when it was made. over: it is answered, or will be as soon as the
    others have told what has ended with them. failed: the requests that have not ended go on."""

    args: m.AnyArgs
    at: float
    over: bool = False
    failed: bool = False


class FleetView(msgspec.Struct, frozen=True):
    """See the module. boot_id: of the fleet. replicas: by name. adapters: adapter_epoch by name. gateways: addresses of
    all. least_epoch: a request of a session may get no older weights from now on, unless it is stale_ok. endings: by a
    key. removed: names of the replicas that an operator has removed."""

    term: int
    number: int
    boot_id: str
    replicas: dict[str, ReplicaView]
    adapters: dict[str, int]
    gateways: list[str]
    least_epoch: int = 0
    endings: dict[str, EndingView] = {}
    removed: list[str] = []


NO_VIEW = FleetView(0, 0, "", {}, {}, [])


@dataclass
class Follower:
    """A gateway that follows, or that may follow. acknowledged: number of its view. until: time on the event loop's
    clock at which its view is certainly invalid."""

    acknowledged: int
    until: float


class Views:
    """The views of this gateway, while it leads. address: of this gateway; "" = it is the only one. replicas: by name.
    state: of the fleet. probe: finds out which gateways have ended, see Peers. is_sure: returns whether no other
    gateway can lead.

    least_epoch, removed: see FleetView."""

    def __init__(
        self,
        config: FleetConfig,
        address: str,
        replicas: dict[str, Replica],
        state: FleetState,
        probe: Callable[[], None] = lambda: None,
        is_sure: Callable[[], bool] = lambda: True,
    ):
        self._valid_s = config.fence_after_s
        self._address = address
        self._replicas = replicas
        self._state = state
        self._probe = probe
        self._is_sure = is_sure
        self._followers: dict[str, Follower] = {}
        self._silent: set[str] = set()  # gateways that may live, and whose views are invalid
        self._endings: dict[str, EndingView] = {}
        # What the calls that are not answered yet have ended: by their keys, and by gateway.
        self._ended: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
        self._encoded: tuple[FleetView, bytes] | None = None
        self._changed = asyncio.Event()  # replaced by each new view
        self._acknowledged = asyncio.Event()
        self._publishing: asyncio.Handle | None = None
        self.view = NO_VIEW
        self.least_epoch = 0
        self.removed: list[str] = []
        self.why = "it does not lead yet"  # why there is no view

    # ------------------------------------------------------------------ the gateway that leads

    def begin(self, term: int, gateways: Collection[str]) -> None:
        """Begin to lead. gateways: those that the engines know. Each may have a view of the gateway that led before."""
        until = asyncio.get_running_loop().time() + self._valid_s
        self._followers = {gateway: Follower(0, until) for gateway in gateways if gateway != self._address}
        self._silent, self._endings, self._ended = set(), {}, {}
        self.why, self.least_epoch = "", self._state.weight_epoch
        self.view = replace(NO_VIEW, term=term)
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
            self.view = replace(now, number=self.view.number + 1)
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

    def raise_least_epoch(self, epoch: int) -> asyncio.Future[None] | None:
        """Keep the requests of sessions from weights that are older than ``epoch``, in all gateways. Return the future
        of this; None = it is done."""
        self.least_epoch = max(self.least_epoch, epoch)
        return asyncio.ensure_future(self.caught_up()) if self._followers else None

    async def announce(self, args: m.Args) -> str:
        """Let the others end what a call ends with them. Return its key, before the engines get the call."""
        key = uuid.uuid4().hex
        self._endings[key], self._ended[key] = EndingView(args, time.time()), {}
        await self.caught_up()
        return key

    async def conclude(self, key: str, failed: bool) -> dict[str, Ended]:
        """Tell the others that a call is over. Return what has ended with them, by the ids that clients know."""
        if (call := self._endings.get(key)) is None:  # another gateway has led meanwhile
            return {}
        self._endings[key] = replace(call, over=True, failed=failed)
        await self.caught_up()
        ended: dict[str, Ended] = {}
        for of_gateway in self._ended.pop(key, {}).values():
            for name, (choices, tokens) in of_gateway.items():
                entry = ended.setdefault(name, Ended())
                entry.choices += choices
                entry.tokens += tokens
        self._forget_endings()
        return ended

    def gone(self, gateway: str) -> None:
        """Forget a gateway that has ended."""
        self._silent.discard(gateway)
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
        for key in args.ended.keys() & self._ended.keys() if known else ():
            self._ended[key][args.gateway] = args.ended[key]
        self._acknowledged.set()
        if known and args.gateway in self._silent:
            self._silent.discard(args.gateway)
            self._forget_endings()
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
        if self._encoded is None or self._encoded[0] is not self.view:
            self._encoded = self.view, msgspec.msgpack.encode(self.view)
        return {"view": self._encoded[1] if newer else None}

    # ------------------------------------------------------------------ inside

    def _require(self) -> None:
        if self.why or not self._is_sure():
            raise NotLeader(f"this gateway does not lead: {self.why or 'its lease may have ended'}", began=False)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._acknowledged.set()

    def _forget_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        for gateway in [gateway for gateway, follower in self._followers.items() if follower.until <= now]:
            self.gone(gateway)
            self._silent.add(gateway)

    def _forget_endings(self) -> None:
        """Forget the calls that are answered, unless a gateway that was silent has still to know of them."""
        answered = [key for key in self._endings if key not in self._ended]
        for key in answered[:-MAX_LATE_ENDINGS] if self._silent else answered:
            del self._endings[key]
        self.changed()

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
            self.view.term,
            number,
            self._state.boot_id,
            replicas,
            adapters,
            gateways,
            self.least_epoch,
            dict(self._endings),
            list(self.removed),
        )
