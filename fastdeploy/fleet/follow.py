"""A gateway that follows the one that leads: it has the members of the leader's view, and asks for the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from fastdeploy.core.errors import FastDeployError
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.peers import Peers
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState
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


class Following:
    """The view that this gateway follows. peers: the other gateways; None = there is none. apply(view): takes over a
    view. changed: called when the view becomes valid or invalid, and when the leader changes.

    leader: address of the gateway that is followed; "" = none. view: the last one, also after its end."""

    def __init__(
        self,
        peers: Peers | None,
        config: FleetConfig,
        apply: Callable[[FleetView], None],
        changed: Callable[[], None],
    ):
        self._peers = peers
        self._config = config
        self._apply = apply
        self._changed = changed
        self._valid_until = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        self.leader = ""
        self.view = NO_VIEW

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

    async def _ask(self, leader: str, patience: asyncio.Timeout) -> None:
        assert self._peers is not None
        now, client = asyncio.get_running_loop().time, self._peers.client(leader)
        while True:
            asked = now()
            # After a change of the leader, the first question acknowledges nothing.
            known = self.view if self.leader else NO_VIEW
            reply = await client.call(m.FollowArgs(self._peers.endpoint, known.term, known.number))
            patience.reschedule(now() + self._config.lease_s)
            was_valid, was_leader = self.valid, self.leader
            self._renew(asked)
            self.leader = leader
            if (view := reply["view"]) is not None:
                self.view = msgspec.convert(view, FleetView)
                self._apply(self.view)
            elif not was_valid or not was_leader:
                self._changed()

    def _renew(self, asked: float) -> None:
        self._valid_until = asked + self._config.fence_after_s
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_at(self._valid_until, self._changed)

    def close(self) -> None:
        """Follow nobody any more."""
        if self._expiry is not None:
            self._expiry.cancel()


def must_be_cut(replica: Replica, before: ReplicaView | None, now: ReplicaView | None) -> bool:
    """Return whether the connection to a replica must end, because the gateway that leads has ended its own meanwhile.
    before: the replica in the last view of the same term."""
    if not replica.in_quorum and not replica.in_flight:
        return False
    welcome = replica.client.welcome
    if now is None or welcome is None or now.boot_id != welcome.boot_id:
        return True
    return before is not None and before.lives != now.lives
