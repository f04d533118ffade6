"""The replicas that run or keep the requests with retain_s, wherever these came in: a request that is sent again goes
to the replica that has its tokens."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.inter_communicator import messages as m

MAX_KNOWN = 65536  # requests whose replica is remembered


class RetainedRequests:
    """The requests with retain_s that this gateway has sent, and its questions for those that others have sent. Use
    from one event loop only."""

    def __init__(self, config: FleetConfig, membership: Membership):
        self._config = config
        self._membership = membership
        self._all_by = 0.0  # on the event loop's clock
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()  # names of replicas, boot ids of their engines

    def sent(self, request: AddRequest, replicas: Iterable[Replica]) -> None:
        """Remember that a request was sent to ``replicas``."""
        for replica in replicas:
            self._known[request.request_id] = _engine_of(replica)
            self._known.move_to_end(request.request_id)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def holder(self, request: AddRequest) -> Replica | None:
        """Return the member that has the tokens of the request with this id, if one has. Another gateway may have sent
        it: before, or after the engine that is known here was lost. So all replicas are asked, unless that engine
        lives. A replica that is joining, since another gateway has begun to lead, is waited for."""
        now = asyncio.get_running_loop().time
        end = now() + self._config.failover_s
        await self._connected_to_all()
        while now() < end:
            holder = self._remembered(request) or await self._asked(request)
            if holder is None or holder.in_quorum or await self._joins(holder, end):
                return holder
            if holder.blocked:
                break
        return None

    async def _connected_to_all(self) -> None:
        """Wait in a gateway that starts until it is connected to all replicas, at most for rebuild_s."""
        now, replicas = asyncio.get_running_loop().time, self._membership.replicas
        self._all_by = self._all_by or now() + self._config.rebuild_s
        while now() < self._all_by and any(r.state is ReplicaState.STARTING for r in replicas.values()):
            await self._membership.until_moved(self._all_by - now())

    async def _joins(self, holder: Replica, end: float) -> bool:
        """Wait until ``holder`` is a member, at most until ``end``. Return False if its engine is lost. One that is cut
        off may connect again in a moment."""
        engine, now = _engine_of(holder), asyncio.get_running_loop().time
        cut_at = 0.0
        while not holder.in_quorum:
            is_joining = holder.state is ReplicaState.JOINING
            cut_at = 0.0 if is_joining else cut_at or now()
            until = end if is_joining else min(end, cut_at + self._config.fence_after_s)
            if now() >= until or holder.blocked or (is_joining and _engine_of(holder) != engine):
                return False
            await self._membership.until_moved(until - now())
        return _engine_of(holder) == engine

    def _remembered(self, request: AddRequest) -> Replica | None:
        known = self._known.get(request.request_id)
        return next((replica for replica in self._membership.connected if _engine_of(replica) == known), None)

    async def _asked(self, request: AddRequest) -> Replica | None:
        """Ask all replicas. Return the one whose tokens a client has got last. Only if there is none, one with the rest
        of a request whose engine was lost: there the request is computed again."""
        waiting: dict[asyncio.Future[m.Reply], Replica] = {}
        for replica in self._membership.connected:
            future = replica.client.post(m.RetainedArgs(request.request_id))
            future.add_done_callback(lambda future: future.cancelled() or future.exception())
            waiting[future] = replica
        done, _ = await asyncio.wait(waiting, timeout=self._config.fence_after_s) if waiting else (set(), set())
        answers = {waiting[future]: future.result().result for future in done if future.exception() is None}
        known = {replica: answer.get("kept_s") for replica, answer in answers.items() if answer.get("known")}
        kept = {replica: seconds for replica, seconds in known.items() if seconds is not None}
        return min(kept, key=kept.__getitem__, default=next(iter(known), None))


def _engine_of(replica: Replica) -> tuple[str, str]:
    """Return the name of a replica, and the boot id of its engine."""
    return replica.name, replica.boot_id
