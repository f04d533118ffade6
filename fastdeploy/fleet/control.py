"""Control calls over all replicas: one transaction each, see fleet/transaction.py and fleet/calls.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, NotLeader, from_wire
from fastdeploy.core.weight_source import FileSource, FolderSource, Source
from fastdeploy.fleet.call import Context
from fastdeploy.fleet.calls import call_for
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.endings import ENDS, EndingCall
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.remote import Outcomes, is_remote
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.running_call import RunningCall
from fastdeploy.fleet.staging import Staging
from fastdeploy.inter_communicator import messages as m


class FleetControl:
    """The maker of control calls: each is made on every member, and has one answer. A gateway that does not lead
    changes nothing, fences nobody, and has no members: it reads from the replicas that it is connected to. Use from one
    event loop only.

    staging: of the sources of these calls. end_requests(args): ends what the call must end and what is at no replica;
    called when the call is sent."""

    def __init__(
        self,
        config: FleetConfig,
        membership: Membership,
        staging: Staging,
        end_requests: Callable[[m.Args], EndingCall] = EndingCall,
    ):
        self._config = config
        self._membership = membership
        self._staging = staging
        self.state, self._views = membership.state, membership.views
        self._end_requests = end_requests
        self._runs: dict[RunningCall, None] = {}
        self._sleeping = asyncio.Lock()
        self._in_order = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make one call on all members. Raises the error of the replicas if all refuse alike, FleetCallFailed if their
        errors differ, EngineDead if there is no member. Every report and error has a list "replicas".

        The call goes on if this coroutine is cancelled. Calls are sent in the order in which this function is called,
        unless their source must be sent to other hosts first. A sleep or wake-up is sent when the one before it has
        ended. Of several gateways, all know what the call has changed before it is answered."""
        if self._views.has_followers and not args.reads:
            return await asyncio.shield(asyncio.ensure_future(self._call_with_followers(args)))
        return await self._call(args)

    async def _call_with_followers(self, args: m.Args) -> dict[str, Any]:
        """Make a call, with what it means for the other gateways. See fleet/view.py."""
        async with self._in_order:
            key = await self._views.announce(args) if isinstance(args, ENDS) else ""
        failed, elsewhere = True, EndingCall(args)
        try:
            report = await self._call(args)
            failed = False
            await self._settle()
        finally:
            if key:
                elsewhere.ended = await self._views.conclude(key, failed)
            else:
                await self._views.caught_up()
        return elsewhere.report(report)

    async def _settle(self) -> None:
        """Wait for the replicas that were there when this gateway began to lead, and have not joined yet. The call has
        missed them, and requests of other gateways may run there. So cut those off that are still not members when no
        other one has joined for fence_after_s, or after stall_s."""
        now, membership, config = asyncio.get_running_loop().time, self._membership, self._config
        last, end, num = now() + config.stall_s, 0.0, 0
        while late := [r for r in membership.replicas.values() if r.unsettled and membership.leadership.leads]:
            if len(late) != num:
                num, end = len(late), min(now() + config.fence_after_s, last)
            if now() >= end:
                for replica in late:
                    membership.cut(replica, "it has missed a call before it joined")
                return
            await membership.until_moved(end - now())

    async def _call(self, args: m.Args) -> dict[str, Any]:
        if isinstance(args, m.SleepArgs | m.WakeArgs):
            return await asyncio.shield(asyncio.ensure_future(self._call_in_turn(args)))
        if isinstance(args, m.SentCallArgs):
            return await self._call_sent(args)
        if isinstance(args, m.SourcedArgs):
            if self._staging.needed(args.source):
                return await asyncio.shield(asyncio.ensure_future(self._call_staged(args)))
            if isinstance(args.source, FolderSource):
                with self._explained():
                    return await asyncio.shield(self._start(args, {}))
        return await asyncio.shield(self._start(args, {}))

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
        due += [session.expires_at for session in self.state.weight_sessions.values() if session.open]
        if due and not self._closed and self._membership.leadership.leads:
            self._timer = asyncio.get_running_loop().call_at(min(due), self._expire)

    async def _call_in_turn(self, args: m.Args) -> dict[str, Any]:
        """Make a sleep or wake-up after the one before it. A sleep takes effect on each member at another time, so the
        members would handle one that is sent meanwhile in different states, and could not agree on it."""
        async with self._sleeping:
            return await self._start(args, {})

    async def _call_staged(self, args: m.SourcedArgs) -> dict[str, Any]:
        """Send the source of a call to the other hosts, and make the call. Errors: see :meth:`_sources`; then no engine
        has the call."""
        async with contextlib.AsyncExitStack() as files:
            with self._changing():  # a replica that joined now would not have the file
                outcomes = await self._staging.outcomes(args.source, self._staging.needed(args.source), files)
                call = self._start(args, self._sources(outcomes))
            return await call

    async def _call_sent(self, args: m.SentCallArgs) -> dict[str, Any]:
        """Make a call whose source the gateway that got it has sent to the other hosts. See SentCallArgs."""
        elsewhere = [replica for replica in self._membership.quorum if replica.placement.host != args.host]
        boots = {replica.name: replica.boot_id for replica in elsewhere}
        copies = {name: copy for name, copy in args.copies.items() if copy.boot_id == boots.get(name)}
        if uncopied := {name: boot for name, boot in boots.items() if name not in copies}:
            return {"uncopied": uncopied}
        outcomes = {name: _outcome(copy) for name, copy in copies.items()}
        return await asyncio.shield(self._start(args.call, self._sources(outcomes)))

    def _sources(self, outcomes: Outcomes) -> dict[str, Source]:
        """Return the sources of the replicas to which a source was sent, and fence those that could not be reached.
        Raises the first error with which an API server has refused it. If no member would be left, raises the first
        error of all, and fences nobody: the cause may be the host that has the source."""
        errors = {name: error for name, error in outcomes.items() if isinstance(error, FastDeployError)}
        for error in errors.values():
            if not isinstance(error, EngineError):
                raise error
        members = {replica.name: replica for replica in self._membership.quorum}
        if errors and members.keys() <= errors.keys():
            raise next(iter(errors.values()))
        for name in members.keys() & errors.keys():
            self.fence(members[name], errors[name].message)
        return {name: source for name, source in outcomes.items() if isinstance(source, FileSource)}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.state.changing += 1
        self.state.revision += 1
        try:
            yield
        finally:
            self.state.changing -= 1

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to the refusal of a folder by other hosts only that folders are not sent."""
        remote = {replica.name for replica in self._membership.quorum if is_remote(replica)}
        try:
            yield
        except FastDeployError as error:
            refused = [entry["name"] for entry in error.detail.get("replicas", ()) if entry["status"] == "refused"]
            if not refused or not remote.issuperset(refused):
                raise
            why = f"refused by {', '.join(refused)}, on other hosts: a folder must have the same path on all hosts"
            raise from_wire(error.code, f"{error.message} ({why})", error.detail) from error

    def _start(self, args: m.Args, sources: dict[str, Source]) -> asyncio.Future[dict[str, Any]]:
        """Send the call to all members, without waiting. Return the future of its report."""
        if self._closed:
            raise EngineDead("the gateway is shutting down")
        leads = self._membership.leadership.leads
        if args.leader_only and not args.reads:
            self._membership.leadership.require()
        replicas, in_quorum = self._membership.quorum, leads
        if not replicas and args.reads and not leads:
            replicas, in_quorum = self._membership.connected, False
        if not replicas:
            raise EngineDead("no replica of the fleet is ready")
        self._membership.require_known(args)
        members = {replica.name: replica for replica in replicas}
        call = call_for(args, Context(self.state, self._config, asyncio.get_running_loop().time(), in_quorum))
        call.sources = sources
        participants = [members[name] for name in call.participants(list(members))]
        msgspec.msgpack.encode(args)  # raises if the call cannot be sent: then nothing has begun
        ending = self._end_requests(args)
        announce = self._views.raise_least_epoch
        run = RunningCall(call, participants, ending, self.fence, self._ended, self._step_down, announce)
        self._runs[run] = None
        run.start()
        return run.future

    def fence(self, replica: Replica, why: str) -> None:
        """Fence a replica that a call has lost, unless it is out already."""
        self.state.forget_replica(replica.name)
        if replica.in_quorum and not self._closed and self._membership.leadership.leads:
            self._membership.fence(replica, why)

    def _ended(self, run: RunningCall) -> None:
        del self._runs[run]
        if run.announced and not run.may_have_committed:
            self._views.least_epoch = self.state.weight_epoch
        self._views.changed()
        self.rearm()

    def _step_down(self, error: NotLeader) -> None:
        """End all calls, since a replica follows another gateway, which decides what the replicas do now."""
        for run in list(self._runs):
            run.abandon(NotLeader(error.message))
        self._membership.leadership.depose(error.message)

    def _expire(self) -> None:
        """Release the holds whose ttl has ended on all members at once, and end silent sessions."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        calls: list[m.Args] = [
            m.ResumeArgs(hold_id, scope)
            for (scope, hold_id), hold in self.state.holds.items()
            if hold.expires_at is not None and hold.expires_at <= now
        ]
        for session in [s for s in self.state.weight_sessions.values() if s.open and s.expires_at <= now]:
            calls.append(m.AbortUpdateArgs(session.id))
            self.state.close_weight_session(session)
        for args in calls:
            try:
                self._start(args, {})
            except FastDeployError:  # no member has the session, or there is no member
                continue
        self.rearm()


def _outcome(copy: m.Copy) -> FileSource | FastDeployError:
    failure = copy.failure
    return FileSource(copy.path) if failure is None else from_wire(failure.code, failure.message, failure.detail)
