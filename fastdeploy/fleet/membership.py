"""The replicas of the fleet, and their way into it and out of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from fastdeploy.core.errors import EngineError, EngineStalled, FleetMixed, ReplicaNotFound
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.follow import Following
from fastdeploy.fleet.join import Joiner
from fastdeploy.fleet.joins import RETRY_S, Joins, retry_s
from fastdeploy.fleet.launcher import Launcher, Placement, Roll
from fastdeploy.fleet.leader import GatewayLeadership
from fastdeploy.fleet.peers import Peers
from fastdeploy.fleet.rebuild import StateReport, rebuild, reference
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState
from fastdeploy.fleet.roll import RollingChange
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.transfer import Transfer
from fastdeploy.fleet.view import FleetView, Views
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import lacking
from fastdeploy.inter_communicator.transport import Connector

logger = logging.getLogger(__name__)
MakeConnector = Callable[[Placement], Connector]


class Membership:
    """The replicas of one gateway: it follows the launcher, leads every replica, and lets it join; or it follows the
    gateway that leads, whose members are then its own. changed: called after each change of the members. connector:
    makes the connector to a replica's engine. peers: the other gateways; None = there is none. state: of the fleet.
    hosts: of replicas elsewhere. views: for the others, while this gateway leads. following: while another one does.
    joins: those that are under way."""

    def __init__(
        self,
        config: FleetConfig,
        launcher: Launcher,
        connector: MakeConnector,
        changed: Callable[[], None],
        peers: Peers | None = None,
    ):
        self._config = config
        self._launcher = launcher
        self._connector = connector
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()  # a replica has changed its state, or is blocked
        self._broken: asyncio.Queue[BaseException] = asyncio.Queue()  # errors of tasks
        self._restarts: dict[Replica, asyncio.Task[None]] = {}
        self._quorum: dict[str, Replica] = {}  # those in the states of a member, and those that are open, in the order
        self._open: dict[str, Replica] = {}  # of their joins
        self.replicas: dict[str, Replica] = {}
        self.state = FleetState()
        self._address = peers.endpoint if peers is not None else ""
        probe = peers.probe if peers is not None else lambda: None
        self.views = Views(config, self._address, self.replicas, self.state, probe, lambda: self.leadership.is_sure)
        self.following = Following(peers, config, self.replicas, self.state, self.cut, self._drop, changed)
        self.leadership = GatewayLeadership(
            config,
            self.replicas,
            self.state,
            self._begin,
            self._renewed,
            self._end,
            self._address,
            self.following.follow,
        )
        self.hosts = RemoteHosts(config)
        transfer = Transfer(self.hosts, config.fence_after_s)
        self._joiner = Joiner(config, self.state, self.leadership, self.replicas, transfer)
        self.joins = Joins(
            config, self._joiner, self.state, self.leadership, self.fence, self._replica_changed, self._spawn
        )

    @property
    def quorum(self) -> list[Replica]:
        """The replicas that take part in control calls."""
        return list(self._quorum.values())

    @property
    def view(self) -> FleetView:
        """The view of the fleet that all of its gateways have."""
        return self.views.view if self.leadership.leads else self.following.view

    @property
    def open(self) -> list[Replica]:
        """The replicas that take new requests."""
        return list(self._open.values())

    @property
    def connected(self) -> list[Replica]:
        """The replicas whose engine answers, members or not."""
        return [replica for replica in self.replicas.values() if replica.client.connected.is_set()]

    @property
    def missing_because(self) -> str:
        """Why there is no member."""
        return self.leadership.why or "every replica is lost, or has not joined yet"

    @property
    def boot_id(self) -> str:
        """The boot id of the fleet. Another one means that its weights were lost."""
        return self.state.boot_id

    def require_known(self, message: msgspec.Struct) -> None:
        """Raise FleetMixed if a member runs a version of this package that does not know ``message``, or what it has.
        A request may go on at any member, and a call is made on all of them, so all must know it."""
        lacks = {
            replica.name: missing
            for replica in self._quorum.values()
            if replica.cannot and (missing := lacking(message, replica.knows))
        }
        if lacks:
            who = "; ".join(
                f"{name} (version {self.replicas[name].software}) does not know {', '.join(missing)}"
                for name, missing in lacks.items()
            )
            raise FleetMixed(f"the members of the fleet have different versions: {who}", cannot=lacks)

    async def run(self) -> None:
        """Follow the launcher, and lead, until this is cancelled. Raises an unexpected error of any task, since the
        fleet would miss what the task did; then this process must be replaced."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._until_broken(), name="fleet-tasks")
            group.create_task(self._follow(), name="fleet-launcher")
            group.create_task(self.leadership.run(), name="fleet-leadership")
            group.create_task(RollingChange(self, self._launcher).run(), name="fleet-roll")

    async def _until_broken(self) -> None:
        raise await self._broken.get()

    async def close(self) -> None:
        """Close all connections. The replicas run on, and their holds stand."""
        self.following.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas.values():
            replica.cut("the gateway is shutting down")
        await asyncio.gather(*(replica.client.close() for replica in self.replicas.values()))
        await self.hosts.close()
        await self._launcher.close()

    # ------------------------------------------------------------------ calls of operators

    def find(self, name: str) -> Replica:
        """Return the replica of this name. Raises ReplicaNotFound."""
        if (replica := self.replicas.get(name)) is None:
            raise ReplicaNotFound(f"name: the fleet has no replica {name!r}", param="name")
        return replica

    async def drain(self, name: str) -> None:
        """Send no new request to a replica. Returns when nothing runs there any more. It takes part in control calls
        all the time, and stays drained if it is restarted. Raises ReplicaNotFound."""
        replica = self.find(name)
        replica.drains = True
        if replica.state is ReplicaState.MEMBER:
            replica.advance(ReplicaEvent.DRAIN)
        await self.views.caught_up()
        await replica.idle.wait()
        while self.views.has_followers and replica.client.connected.is_set():  # the others have sent requests, too
            load = replica.keep_report(await replica.client.call(m.FleetStateArgs()))
            if not load["running"] + load["waiting"]:
                return
            await asyncio.sleep(RETRY_S)

    def undrain(self, name: str) -> None:
        """Send requests to a drained replica again. Raises ReplicaNotFound."""
        replica = self.find(name)
        replica.drains = False
        if replica.state is ReplicaState.DRAINING:
            replica.advance(ReplicaEvent.UNDRAIN)

    async def remove(self, name: str, drain_s: float | None = None) -> None:
        """Drain a replica for at most ``drain_s`` seconds (None = as configured), and end it. What still runs there
        goes on elsewhere. Raises ReplicaNotFound."""
        replica = self.find(name)
        try:
            await asyncio.wait_for(self.drain(name), self._config.drain_s if drain_s is None else drain_s)
        except TimeoutError:
            logger.warning("replica %s is removed with %d choices in flight", name, replica.in_flight)
        self._drop(replica, "it was removed")
        self.views.removed.append(name)
        await self._launcher.remove(name)

    async def add(self) -> str:
        """Start one more replica, which joins when it is ready. Return its name."""
        return await self._launcher.add()

    @property
    def roll(self) -> Roll | None:
        """The last rolling change; None = there was none."""
        return self._launcher.roll

    async def begin_roll(self, given: dict[str, str], drain_s: float) -> Roll:
        """Begin to replace every process by one with these flags. See Launcher.begin_roll."""
        return await self._launcher.begin_roll(given, drain_s)

    async def replace(self, replica: Replica) -> None:
        """Let the launcher start a replica with the settings of its rolling change. What runs there goes on elsewhere.
        Returns when the old process has ended."""
        why = "a rolling change replaces it"
        replica.advance(ReplicaEvent.FENCE, why)
        replica.cut(why)
        if replica in self._restarts:
            await self._launcher.replace(replica.name)
        else:
            self._restarts[replica] = self._spawn(self._restart_and_reconnect(replica, self._launcher.replace))
            await asyncio.wait([self._restarts[replica]])

    def fence(self, replica: Replica, why: str) -> None:
        """Cut ``replica`` off at once, and have it restarted. Its open requests and calls fail with EngineDead after
        the change of its state. It joins again with the fleet's state only."""
        if replica.state in (ReplicaState.FENCED, ReplicaState.REMOVED):
            return
        replica.advance(ReplicaEvent.FENCE, why)
        self._restart(replica, why)

    async def until_moved(self, seconds: float) -> None:
        """Return when a replica has changed its state or is blocked, or after ``seconds``."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._moved.wait(), seconds)

    # ------------------------------------------------------------------ the launcher

    async def _follow(self) -> None:
        async for placements in self._launcher.placements():
            listed = {placement.name: placement for placement in placements}
            for name in [name for name in self.replicas if name not in listed]:
                self._drop(self.replicas[name], "the launcher has ended it")
            for placement in listed.values():
                self._place(placement)
            self.leadership.replicas_changed()
        await asyncio.Event().wait()

    def _place(self, placement: Placement) -> None:
        replica = self.replicas.get(placement.name)
        if replica is None:
            connector = self._connector(placement)
            stall_s, on = self._config.stall_s, (self._replica_changed, self._replica_lost)
            replica = Replica(placement, connector, stall_s, *on, gateway=self._address)
            self.replicas[placement.name] = replica
            replica.client.start()
        elif placement != replica.placement:
            moved = placement.endpoint != replica.placement.endpoint
            replica.placement = placement
            if moved:
                self.cut(replica, "it was started anew at another address")

    def _drop(self, replica: Replica, why: str) -> None:
        if self.replicas.get(replica.name) is not replica:
            return
        del self.replicas[replica.name]
        if (restart := self._restarts.pop(replica, None)) is not None:
            restart.cancel()
        replica.advance(ReplicaEvent.REMOVE, why)
        replica.cut(why)
        self._spawn(replica.client.close())
        self.leadership.replicas_changed()

    def _restart(self, replica: Replica, why: str) -> None:
        replica.cut(why)
        if replica not in self._restarts:
            restart = partial(self._launcher.restart, why=why)
            self._restarts[replica] = self._spawn(self._restart_and_reconnect(replica, restart))

    def cut(self, replica: Replica, why: str) -> None:
        """Cut a replica off, and connect to it again. Somebody else restarts it, if it must be."""
        if replica in self._restarts:
            return
        replica.advance(ReplicaEvent.FENCE, why)
        replica.cut(why)
        self._restarts[replica] = self._spawn(self._reconnect(replica))

    async def _restart_and_reconnect(self, replica: Replica, restart: Callable[[str], Awaitable[None]]) -> None:
        try:
            await restart(replica.name)
        except Exception:  # the replica may be there all the same
            logger.exception("replica %s could not be restarted", replica.name)
        if replica.failures:  # the last restart did not help
            await asyncio.sleep(retry_s(replica.failures))
        replica.failures += 1
        await self._reconnect(replica)

    async def _reconnect(self, replica: Replica) -> None:
        """Connect to the next engine of the replica, once the old connection is closed."""
        await replica.client.close()
        del self._restarts[replica]
        replica.connect_again(replica.placement, self._connector(replica.placement))

    # ------------------------------------------------------------------ changes of a replica

    def _replica_changed(self, replica: Replica) -> None:
        _keep(self._quorum, replica, replica.in_quorum)
        _keep(self._open, replica, replica.state is ReplicaState.MEMBER)
        if replica.state is ReplicaState.JOINING:
            self.joins.begin(replica)
            self.following.place(replica)
        else:
            self.joins.end(replica)
        if not replica.in_quorum:
            self.state.forget_replica(replica.name)
        if not self._quorum:
            self._joiner.profile = None  # all replicas may come back with another model
        self._moved.set()
        self.leadership.replicas_changed()
        self.views.changed()
        self._changed()

    def _replica_lost(self, replica: Replica, error: EngineError) -> None:
        if isinstance(error, EngineStalled):  # its process is there, so nobody else restarts it
            if self.following.leader:
                self.cut(replica, error.message)
            else:
                self._restart(replica, error.message)

    # ------------------------------------------------------------------ leadership

    def _begin(self, reports: Sequence[StateReport]) -> None:
        self.following.end()
        self._depose([replica for replica in self.replicas.values() if replica.in_quorum])
        now = asyncio.get_running_loop().time()
        self.state.replace(rebuild(self.leadership.fleet, reports, now))
        serving = reference(self.leadership.fleet, reports)
        logger.info("the fleet serves %r, epoch %d", serving["version"], serving["weight_epoch"])
        for replica in self.replicas.values():
            if replica.state is ReplicaState.JOINING:
                replica.unsettled = True
                self.joins.begin(replica)
        self.views.begin(self.leadership.term, {gateway for report in reports for gateway in report["gateways"]})
        self._changed()

    def _end(self, why: str) -> None:
        self.views.end(why)
        self.joins.end_all()
        self._depose([r for r in self.replicas.values() if r.in_quorum or r.state is ReplicaState.JOINING], why)
        self.state.end_weight_sessions()
        self._changed()

    def _depose(self, replicas: Sequence[Replica], why: str = "") -> None:
        """Let replicas join again, with their connections and what runs there."""
        for replica in replicas:
            replica.advance(ReplicaEvent.DEPOSED, why)

    def _renewed(self, replica: Replica, revision: int) -> None:
        """Fence a member that does not have the weights of the fleet any more, without a call of this gateway. Learn
        their fingerprint, if it is not known."""
        state = self.state
        if state.changing or state.revision != revision or not replica.in_quorum:
            return
        if replica.weight_epoch != state.weight_epoch:
            self.fence(
                replica, f"its weights have epoch {replica.weight_epoch}, those of the fleet {state.weight_epoch}"
            )
        elif state.fingerprint is None and replica.report["fingerprint"] is not None:
            # The weights slept when this gateway began to lead. A sleeping engine does not tell the fingerprint.
            state.fingerprint = replica.report["fingerprint"]
            state.revision += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.put_nowait(error)


def _keep(replicas: dict[str, Replica], replica: Replica, is_one: bool) -> None:
    """Add a replica, or take it out."""
    if not is_one:
        replicas.pop(replica.name, None)
    else:
        replicas.setdefault(replica.name, replica)
