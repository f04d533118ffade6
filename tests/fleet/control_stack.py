"""FleetControl over real ZMQ: engines in threads, one replica object each, and no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.control import FleetControl
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fleet.fake_fleet import FakeEngine


class ControlStack:
    """``num`` engines and the control of a gateway. fenced: reasons, by the name of the replica."""

    def __init__(self, num: int, config: FleetConfig, engine: dict[str, Any], runner: dict[str, Any]):
        store = engine.pop("adapter_store", None)
        folders = [{"adapter_store": tempfile.mkdtemp(dir=store)} if store else {} for _ in range(num)]
        self.engines = [FakeEngine(f"r{i}", engine | folder, runner) for i, folder in enumerate(folders)]
        self.replicas = [
            Replica(e.placement, ZmqConnector(e.endpoint), config.stall_s, lambda replica: None) for e in self.engines
        ]
        self.fenced: dict[str, str] = {}
        self.control = FleetControl(config, lambda: [r for r in self.replicas if r.in_quorum], self._fence)
        self._blocked: dict[int, threading.Event] = {}

    def _fence(self, replica: Replica, why: str) -> None:
        self.fenced[replica.name] = why
        replica.advance(ReplicaEvent.FENCE, why)

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
