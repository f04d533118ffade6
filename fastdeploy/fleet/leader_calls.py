"""The way of calls to the gateway that leads, whichever gateway they come to. They wait until there is one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, FleetMixed, NotLeader
from fastdeploy.core.process import host_id
from fastdeploy.core.weight_source import FileSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.control import FleetControl
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.operators import operate
from fastdeploy.fleet.peers import Peers
from fastdeploy.fleet.replica import ReplicaState
from fastdeploy.fleet.staging import Staging
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import lacking


class Gate:
    """A gate before which callers wait while it is shut. They pass it in the order in which they came."""

    def __init__(self) -> None:
        self._open, self._in_order = asyncio.Event(), asyncio.Lock()

    def set(self, is_open: bool) -> None:
        """Open the gate, or shut it."""
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def passed(self) -> None:
        """Return when the gate is open."""
        async with self._in_order:
            while not self._open.is_set():  # it may be shut again before this goes on
                await self._open.wait()


class LeaderCalls:
    """The calls that one gateway makes, or lets the gateway that leads make. control: makes them here.
    staging: sends the sources of the others to other hosts. peers: the other gateways; None = there is none.

    begun: open from the first member on, and once another gateway has led after this one. led: open while a gateway
    leads that can make calls now. A gateway that has just begun to lead has its members back in a moment."""

    def __init__(
        self,
        config: FleetConfig,
        membership: Membership,
        control: FleetControl,
        staging: Staging,
        peers: Peers | None,
    ):
        self._config = config
        self._membership = membership
        self._staging = staging
        self._control = control
        self._peers = peers
        self._closing = False
        self.begun, self.led = Gate(), Gate()

    def members_changed(self) -> None:
        """Open and shut the gates, as the members and the leader demand."""
        members, leadership = self._membership.quorum, self._membership.leadership
        if members or leadership.deposed.is_set():
            self.begun.set(True)
        may_call = bool(members) or not self._may_join(ReplicaState.JOINING, ReplicaState.FENCED)
        self.led.set(self._closing or bool(self._membership.following.leader) or (leadership.leads and may_call))

    def close(self) -> None:
        """Let nobody wait any more, since this process ends."""
        self._closing = True
        self.begun.set(True)
        self.led.set(True)

    async def until_begun(self) -> None:
        """Wait at ``begun``. Raises EngineDead after the time that a gateway may need to take the place of one that
        died."""
        await self._pass(self.begun)

    async def until_ready(self, args: m.Args) -> None:
        """Wait until a call can be made. A call that reads does so only while the first members join a gateway of
        several that has begun to lead. Raises EngineDead as :meth:`until_begun` does, and NotLeader."""
        if self._peers is not None:
            comes_back = self._membership.leadership.leads and not self._membership.quorum
            if not args.reads or (comes_back and self._may_join(ReplicaState.JOINING)):
                await self._pass(self.led)
        elif not args.reads and not isinstance(args, m.ReplicaArgs):
            await self._pass(self.begun)
            self._membership.leadership.require()

    async def make(self, args: m.Args) -> dict[str, Any]:
        """Make a call here, or let the gateway that leads make it."""
        while True:
            leader = self._membership.following.leader
            if not leader or args.reads or not args.leader_only:
                if isinstance(args, m.ReplicaArgs):
                    return await operate(self._membership, args)
                return await self._control.call(args)
            assert self._peers is not None
            there = self._peers.client(leader)
            try:
                if isinstance(args, m.SourcedArgs) and not args.source.on_every_host:
                    return await asyncio.shield(asyncio.ensure_future(self._call_with_copies(leader, args)))
                return await self._call(leader, args)
            except NotLeader as refusal:
                if refusal.detail.get("began", True):
                    raise
                await self._pass(self.led)
            except EngineError as error:
                if there.connected.is_set():  # it is the gateway's answer
                    raise
                why = f"the gateway that leads was lost during the call, which may have been made: {error.message}"
                raise EngineDead(why) from error

    async def _call_with_copies(self, leader: str, args: m.SourcedArgs) -> dict[str, Any]:
        """Send the source of a call to the other hosts, and let the gateway that leads make the call."""
        copies: dict[str, m.Copy] = {}
        missing = self._staging.needed(args.source)
        async with contextlib.AsyncExitStack() as files:
            while True:
                outcomes = await self._staging.outcomes(args.source, missing, files)
                copies |= {name: _copy(missing[name], outcome) for name, outcome in outcomes.items()}
                report = await self._call(leader, m.SentCallArgs(args, host_id(), copies))
                if "uncopied" not in report:
                    return report
                missing = report["uncopied"]

    async def _call(self, leader: str, args: m.Args) -> dict[str, Any]:
        """Let the gateway that leads make a call. Raises FleetMixed if its version does not know the call."""
        assert self._peers is not None
        there = self._peers.client(leader)
        if there.welcome is not None and (missing := lacking(args, there.welcome.knows)):
            what = f"the gateway that leads (version {there.welcome.software}) does not know {', '.join(missing)}"
            raise FleetMixed(what, cannot={leader: missing})
        return await there.call(args)

    async def describe_replicas(self) -> list[dict[str, Any]]:
        """Return the entries of GET /v1/replicas as the gateway that leads knows them; if it does not tell, as this one
        does."""
        if self._peers is not None and (leader := self._membership.following.leader):
            try:
                async with asyncio.timeout(self._config.fence_after_s):
                    return list((await self._peers.client(leader).call(m.ReplicaArgs("list")))["replicas"])
            except (FastDeployError, TimeoutError):
                pass
        return list((await operate(self._membership, m.ReplicaArgs("list")))["replicas"])

    def _may_join(self, *states: ReplicaState) -> bool:
        """Return whether a replica in one of these states may become a member."""
        return any(r.state in states and not r.blocked for r in self._membership.replicas.values())

    async def _pass(self, gate: Gate) -> None:
        try:
            async with asyncio.timeout(self._config.rebuild_s + self._config.lease_s):
                await gate.passed()
        except TimeoutError:
            raise EngineDead(f"no replica is ready: {self._membership.missing_because}") from None
        if self._closing and not self._membership.quorum:
            raise EngineDead("the server is shutting down")


def _copy(boot_id: str, outcome: FileSource | FastDeployError) -> m.Copy:
    """Return what the gateway that leads is told of a source that was sent, or could not be sent, to one replica."""
    if isinstance(outcome, FastDeployError):
        return m.Copy(boot_id, failure=m.Failure(outcome.code, outcome.message, outcome.detail))
    return m.Copy(boot_id, outcome.path)
