"""FleetControl over real ZMQ: engines in threads, one replica object each, and no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.control import FleetControl
from fastdeploy.fleet.leader import GatewayLeadership
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState
from fastdeploy.fleet.running_call import RunningCall
from fastdeploy.fleet.staging import Staging
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.view import Views
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fleet.fake_fleet import FakeEngine


class Members:
    """What the control of a gateway needs of its membership. fenced: reasons, by the name of the replica."""

    hosts, connected = cast(RemoteHosts, None), ()  # all replicas are on this host

    def __init__(self, config: FleetConfig, replicas: list[Replica]):
        self._replicas = {replica.name: replica for replica in replicas}
        self.fenced: dict[str, str] = {}
        self.state = FleetState()
        self.leadership = GatewayLeadership(
            config, self._replicas, self.state, lambda *args: None, lambda *args: None, print
        )
        self.leadership.leads, self.leadership.term = True, 1
        self.views = Views(config, "", self._replicas, self.state)

    @property
    def quorum(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.in_quorum]

    def require_known(self, message: object) -> None:
        """All engines know all messages."""

    def fence(self, replica: Replica, why: str) -> None:
        self.fenced[replica.name] = why
        replica.advance(ReplicaEvent.FENCE, why)


class ControlStack:
    """``num`` engines and the control of a gateway. fenced: reasons, by the name of the replica."""

    def __init__(self, num: int, config: FleetConfig, engine: dict[str, Any], runner: dict[str, Any]):
        store = engine.pop("adapter_store", None)
        folders = [{"adapter_store": tempfile.mkdtemp(dir=store)} if store else {} for _ in range(num)]
        self.engines = [FakeEngine(f"r{i}", engine | folder, runner) for i, folder in enumerate(folders)]
        self.replicas = [
            Replica(e.placement, ZmqConnector(e.endpoint), config.stall_s, lambda replica: None) for e in self.engines
        ]
        members = Members(config, self.replicas)
        self.fenced = members.fenced
        membership = cast(Membership, members)
        self.control = FleetControl(config, membership, Staging(config, membership))
        self._blocked: dict[int, threading.Event] = {}

    async def start(self) -> None:
        for replica in self.replicas:
            replica.client.start()
        for replica in self.replicas:
            await replica.client.connected.wait()
            replica.advance(ReplicaEvent.JOINED)

    async def block(self, at: int) -> None:
        """Stop the loop of an engine, as a stopped process. Returns once it is stopped."""
        stopped, go_on = threading.Event(), threading.Event()

        def block() -> None:
            stopped.set()
            go_on.wait(60)

        self._blocked[at] = go_on
        self.engines[at].engine.send_heartbeats = block  # type: ignore[method-assign]
        self.engines[at]._transport.wake()
        await asyncio.to_thread(stopped.wait, 20)

    def unblock(self, at: int) -> None:
        """Let an engine that was stopped go on."""
        del self.engines[at].engine.send_heartbeats
        self._blocked[at].set()

    def in_engines(self, read: Callable[[Any], Any]) -> dict[str, Any]:
        """Return ``read(engine)`` of every member."""
        return {
            replica.name: read(fake.engine)
            for fake, replica in zip(self.engines, self.replicas, strict=True)
            if replica.state is ReplicaState.MEMBER
        }

    async def begin(self, args: m.Args) -> tuple[asyncio.Task[dict[str, Any]], RunningCall]:
        """Make a call. Return it when it is sent to all members, and before an answer."""
        call = asyncio.ensure_future(self.control.call(args))
        await asyncio.sleep(0)
        (running,) = self.control._runs
        return call, running

    async def close(self) -> None:
        self.control.close()
        for go_on in self._blocked.values():
            go_on.set()
        await asyncio.gather(*(replica.client.close() for replica in self.replicas))
        for engine in self.engines:
            await asyncio.to_thread(engine.close)


@contextlib.asynccontextmanager
async def control_stack(
    num: int = 2, runner: dict[str, Any] | None = None, fence_after_s: float = 5.0, **engine: Any
) -> AsyncIterator[ControlStack]:
    stack = ControlStack(num, FleetConfig(fleet_id="fleet-1", fence_after_s=fence_after_s), engine, runner or {})
    await stack.start()
    try:
        yield stack
    finally:
        await stack.close()


def holds(stack: ControlStack) -> dict[str, list[str]]:
    return stack.in_engines(lambda engine: sorted(engine.pause.holds))


def served(stack: ControlStack) -> set[tuple[str, int]]:
    labels = stack.in_engines(lambda engine: engine.scopes.whole.weights_label()).values()
    return {(label["version"], label["weight_epoch"]) for label in labels}


def update(k: int, **fields) -> m.UpdateWeightsArgs:
    return m.UpdateWeightsArgs(FolderSource(f"/w{k}"), version=f"v{k}", **fields)


def statuses(report: dict) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in report["replicas"]}


def spoil(stack: ControlStack, at: int, kind: type, error: Exception, after: int = 0) -> None:
    """Let an engine refuse one call of a type, after it has done ``after`` of them."""
    table = stack.engines[at].engine._on_call
    before, left = table[kind], [after]

    def refuse(*args):
        left[0] -= 1
        if left[0] == -1:
            raise error
        return before(*args)

    table[kind] = refuse
