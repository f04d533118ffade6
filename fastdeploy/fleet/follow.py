"""A gateway that follows the one that leads: it has the members of the leader's view, and asks for the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from fastdeploy.core.errors import FastDeployError
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.endings import EndingCall
from fastdeploy.fleet.peers import Peers
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.view import NO_VIEW, FleetView, ReplicaView
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)

S, E = ReplicaState, ReplicaEvent
# (state here, state in the view) -> the events that lead there. Nothing happens for other pairs.
STEPS: dict[tuple[ReplicaState, ReplicaState], tuple[ReplicaEvent, ...]] = {
    (S.JOINING, S.MEMBER): (E.JOINED,),
    (S.JOINING, S.DRAINING): (E.JOINED, E.DRAIN),
    (S.MEMBER, S.DRAINING): (E.DRAIN,),
    (S.MEMBER, S.JOINING): (E.DEPOSED,),
    (S.DRAINING, S.MEMBER): (E.UNDRAIN,),
    (S.DRAINING, S.JOINING): (E.DEPOSED,),
}
EndRequests = Callable[[m.Args, float | None], EndingCall]


def _end_nothing(args: m.Args, before: float | None = None) -> EndingCall:
    return EndingCall(args)


class Following:
    """The view that this gateway follows. peers: the other gateways; None = there is none. replicas: all, by name.
    state: of the fleet. cut(replica, why): ends the connection to a replica, and begins another one. drop(replica,
    why): forgets a replica. changed: called after each view, and when the view becomes valid or invalid, or the leader
    changes.

    leader: address of the gateway that is followed; "" = none. view: the last one, until this gateway leads.
    end_requests(args, before): ends what a call must end here, of what came before this time on the event loop's
    clock (None: all)."""

    def __init__(
        self,
        peers: Peers | None,
        config: FleetConfig,
        replicas: Mapping[str, Replica],
        state: FleetState,
        cut: Callable[[Replica, str], None],
        drop: Callable[[Replica, str], None],
        changed: Callable[[], None],
    ):
        self._peers = peers
        self._config = config
        self._replicas = replicas
        self._state = state
        self._cut, self._drop = cut, drop
        self._changed = changed
        self._valid_until = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        self._decoder = msgspec.msgpack.Decoder(FleetView)
        self._endings: dict[str, EndingCall] = {}
        self.leader = ""
        self.view = NO_VIEW
        self.end_requests: EndRequests = _end_nothing

    @property
    def valid(self) -> bool:
        """Whether requests may be sent to the members of the view."""
        return asyncio.get_running_loop().time() < self._valid_until

    async def follow(self, leader: str) -> bool:
        """Follow the gateway at an address until it does not lead any more, or is lost. Return whether it led."""
        if self._peers is None or leader == self._peers.endpoint:
            return False
        try:
            async with asyncio.timeout(self._config.lease_s) as patience:
                await self._ask(leader, patience)
        except (FastDeployError, TimeoutError) as error:
            logger.warning("gateway %s is not followed: %s", leader, str(error) or "it does not answer")
        followed, self.leader = bool(self.leader), ""
        if followed:
            self._changed()
        return followed

    def end(self) -> None:
        """Follow nobody: this gateway leads."""
        self.view, self._endings = NO_VIEW, {}

    def close(self) -> None:
        """Stop the timer."""
        if self._expiry is not None:
            self._expiry.cancel()

    def place(self, replica: Replica) -> None:
        """Bring a replica to the state that it has in the view, if this gateway follows one."""
        now = self.view.replicas.get(replica.name)
        if now is None or now.boot_id != replica.boot_id:
            return
        for event in STEPS.get((replica.state, now.state), ()):
            replica.advance(event)

    # ------------------------------------------------------------------ inside

    async def _ask(self, leader: str, patience: asyncio.Timeout) -> None:
        """Ask for one view after the other."""
        assert self._peers is not None
        now, client = asyncio.get_running_loop().time, self._peers.client(leader)
        while True:
            asked = now()
            # After a change of the leader, the first question acknowledges nothing.
            known = self.view if self.leader else NO_VIEW
            reply = await client.call(m.FollowArgs(self._peers.endpoint, known.term, known.number, self._ended(known)))
            patience.reschedule(now() + self._config.lease_s)
            self._renew(asked)
            self.leader = leader
            if reply["view"] is not None:
                self._apply(self._decoder.decode(reply["view"]))
            self._changed()

    def _renew(self, asked: float) -> None:
        self._valid_until = asked + self._config.fence_after_s
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_at(self._valid_until, self._changed)

    def _apply(self, view: FleetView) -> None:
        """Take over a view."""
        before, self.view = self.view, view
        known = before.replicas if before.term == view.term else {}
        self._state.follow(view.boot_id, view.adapters)
        self._end_requests(view, is_first=not before.term)
        for name in [name for name in view.removed if name in self._replicas]:
            self._drop(self._replicas[name], "it was removed")
        for name, replica in self._replicas.items():
            now = view.replicas.get(name)
            if now is not None:
                replica.weight_epoch, replica.version, replica.drains = now.weight_epoch, now.version, now.drains
            if _must_be_cut(replica, known.get(name), now):
                self._cut(replica, "the gateway that leads has fenced or lost it")
            self.place(replica)

    def _end_requests(self, view: FleetView, is_first: bool) -> None:
        """Take part in the calls of the view that end requests."""
        for key, call in view.endings.items():
            ending = self._endings.get(key)
            if ending is None:
                before = asyncio.get_running_loop().time() - (time.time() - call.at) if call.over else None
                if call.failed or (call.over and is_first):
                    ending = EndingCall(call.args)
                else:
                    ending = self.end_requests(call.args, before)
            ending.failed = call.failed
            self._endings[key] = ending
        self._endings = {key: self._endings[key] for key in view.endings}

    def _ended(self, view: FleetView) -> dict[str, dict[str, tuple[int, int]]]:
        """Return what the calls that are over in the view have ended here."""
        over = {key: self._endings[key].ended for key, call in view.endings.items() if call.over}
        return {key: {name: (e.choices, e.tokens) for name, e in ended.items()} for key, ended in over.items() if ended}


def _must_be_cut(replica: Replica, before: ReplicaView | None, now: ReplicaView | None) -> bool:
    """Return whether the connection to a replica must end, because the gateway that leads has ended its own meanwhile.
    before: the replica in the last view of the same term."""
    if not replica.in_quorum and not replica.in_flight:
        return False
    if now is None or now.boot_id != replica.boot_id:
        return True
    return before is not None and before.lives != now.lives
