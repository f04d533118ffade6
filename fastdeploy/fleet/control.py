"""Control calls over all replicas: one transaction each, see fleet/transaction.py and fleet/plans.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from fastdeploy.core.errors import EngineDead, FastDeployError, NotLeader
from fastdeploy.core.weight_source import Source
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.plan import Context
from fastdeploy.fleet.plans import READS, UNCHANGED, plan_for
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.running_call import RunningCall
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

StagePart = Callable[[Replica, Source], Awaitable[Source]]


class FleetControl:
    """Makes control calls on every replica of the quorum, and returns one answer each. Use from one event loop only.

    quorum: returns the members. fence(replica, why): cuts a member off at once. state: what every member has.
    stage_part: brings the source of new weights to the host of a replica, and returns the source to use there; None =
    all replicas can read every source.
    deposed: the error of a replica that another gateway leads. As long as it is set, this gateway changes nothing and
    fences nobody. Whoever leads again sets it to None. on_deposed(why): called when it is set. connected: returns the
    replicas that answer reads as long as this gateway has no member because it does not lead."""

    def __init__(
        self,
        config: FleetConfig,
        quorum: Callable[[], Sequence[Replica]],
        fence: Callable[[Replica, str], None],
        state: FleetState | None = None,
        on_deposed: Callable[[str], None] = lambda why: None,
        connected: Callable[[], Sequence[Replica]] = lambda: (),
    ):
        self._config = config
        self._quorum = quorum
        self._fence = fence
        self.state = state or FleetState()
        self.stage_part: StagePart | None = None
        self._on_deposed = on_deposed
        self._connected = connected
        self.deposed: NotLeader | None = None
        self._runs: dict[RunningCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make one call on all members. Raises the error of the replicas if all refuse alike, FleetCallFailed if their
        errors differ, EngineDead if there is no member. Every report and error has a list "replicas".

        The call goes on if this coroutine is cancelled. Calls are sent in the order in which this function is called,
        unless their source must be staged first."""
        sources: dict[str, Source] = {}
        if self.stage_part is not None and isinstance(source := getattr(args, "source", None), Source):
            members = list(self._quorum())
            staged = await asyncio.gather(*(self.stage_part(replica, source) for replica in members))
            sources = {replica.name: source for replica, source in zip(members, staged, strict=True)}
        return await asyncio.shield(self._start(args, sources))

    def close(self) -> None:
        """End all calls with EngineDead, and fence nobody any more. The holds stay."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for run in list(self._runs):
            run.abandon(EngineDead("the gateway is shutting down"))

    def rearm(self) -> None:
        """Set the timer of holds and sessions. Call this after a change of ``state`` from outside."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [hold.expires_at for hold in self.state.holds.values() if hold.expires_at is not None]
        due += [session.expires_at for session in self.state.sessions.values() if session.open]
        if due and not self._closed:
            self._timer = asyncio.get_running_loop().call_at(min(due), self._expire)

    def _start(self, args: m.Args, sources: dict[str, Source]) -> asyncio.Future[dict[str, Any]]:
        """Send the call to all members, without waiting. Return the future of its report."""
        if self._closed:
            raise EngineDead("the gateway is shutting down")
        if self.deposed is not None and not isinstance(args, READS):
            raise NotLeader(self.deposed.message)
        replicas, in_quorum = self._quorum(), True
        if not replicas and isinstance(args, READS):
            replicas, in_quorum = self._connected(), False
        if not replicas:
            raise EngineDead("no replica of the fleet is ready")
        members = {replica.name: replica for replica in replicas}
        plan = plan_for(args, Context(self.state, self._config, asyncio.get_running_loop().time(), in_quorum))
        plan.sources = sources
        participants = [members[name] for name in plan.participants(list(members))]
        msgspec.msgpack.encode(args)  # raises if the call cannot be sent: then nothing has begun
        shows_replicas = not isinstance(args, UNCHANGED)
        run = RunningCall(plan, participants, self._config, shows_replicas, self.fence, self._ended, self._depose)
        self._runs[run] = None
        run.start()
        return run.future

    def fence(self, replica: Replica, why: str) -> None:
        """Fence a replica that a call has lost, unless it is out already."""
        self.state.forget_replica(replica.name)
        if replica.in_quorum and not self._closed and self.deposed is None:
            self._fence(replica, why)

    def _ended(self, run: RunningCall) -> None:
        del self._runs[run]
        self.rearm()

    def _depose(self, error: NotLeader) -> None:
        """End all calls: the other gateway decides what the replicas do now."""
        self.deposed = error
        for run in list(self._runs):
            run.abandon(NotLeader(error.message))
        self._on_deposed(error.message)

    def _expire(self) -> None:
        """Release the holds whose ttl has ended on all members at once, and end silent sessions."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        calls: list[m.Args] = [
            m.ResumeArgs(hold_id, scope)
            for (scope, hold_id), hold in self.state.holds.items()
            if hold.expires_at is not None and hold.expires_at <= now
        ]
        for session in [s for s in self.state.sessions.values() if s.open and s.expires_at <= now]:
            calls.append(m.AbortUpdateArgs(session.id))
            self.state.close_session(session)
        for args in calls:
            try:
                self._start(args, {})
            except FastDeployError:  # no member has the session, or there is no member
                continue
        self.rearm()
