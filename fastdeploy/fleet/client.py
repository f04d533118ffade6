"""FleetClient: what an EngineClient is for one engine, for all replicas of a fleet."""

from __future__ import annotations

import asyncio
from typing import Any

from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core import errors
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.control import FleetControl
from fastdeploy.fleet.launcher import Launcher
from fastdeploy.fleet.membership import MakeConnector, Membership
from fastdeploy.fleet.relay import Attempt
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Router
from fastdeploy.inter_communicator import messages as m


class FleetClient:
    """All requests and control calls of one gateway (see ServingClient). Use from one event loop only.

    The boot id that clients see is that of the fleet. It stays the same as long as the fleet keeps its weights."""

    def __init__(self, config: FleetConfig, launcher: Launcher, connector: MakeConnector):
        self._config = config
        self.membership = Membership(config, launcher, connector, self._members_changed)
        self._control = FleetControl(lambda: self.membership.quorum)
        self._router = Router()
        self._streams: dict[str, tuple[RequestStream, RequestStream, Replica]] = {}
        self._task: asyncio.Task[None] | None = None
        self.missing_because = "no replica has joined yet"
        self.connected = asyncio.Event()
        self.closing = asyncio.Event()
        self.welcome: m.Welcome | None = None
        self.model_info: dict[str, Any] = {}

    def start(self) -> asyncio.Task[None]:
        """Begin to connect to the replicas. Returns the task that does so until :meth:`close`."""
        self._task = asyncio.get_running_loop().create_task(self.membership.run(), name="fleet-client")
        return self._task

    async def close(self) -> None:
        """Drop all connections. Open requests and calls fail with EngineDead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.membership.close()

    def _members_changed(self) -> None:
        members = self.membership.quorum
        boot_id = self.membership.boot_id
        if members and (self.welcome is None or self.welcome.boot_id != boot_id):
            welcome = members[0].client.welcome
            assert welcome is not None
            self.model_info = members[0].client.model_info
            self.welcome = m.Welcome(boot_id, 0, welcome.max_model_len, welcome.software)
            self.connected.set()
        elif not members:
            why = self.membership.leadership.why or "every replica is lost, or has not joined yet"
            self.welcome, self.missing_because = None, why
            self.connected.clear()

    async def require_engine(self) -> m.Welcome:
        """Return the Welcome of the fleet. Raises EngineDead if it has no member."""
        if self.welcome is None:
            raise errors.EngineDead(f"no replica is ready: {self.missing_because}")
        return self.welcome

    async def submit(self, request: AddRequest, reader: Reader | None = None) -> RequestStream:
        """See EngineClient.submit."""
        await self.require_engine()
        replica = self._router.pick(request, self.membership.open)
        if replica is None:
            raise errors.EngineDead("no replica takes requests")
        outer = RequestStream(request.request_id, request.n, self._cancel, self._forget, reader, request.fingerprint)
        inner = await replica.client.submit(request, Attempt(outer))
        replica.in_flight += request.n
        self._streams[request.request_id] = (outer, inner, replica)
        return outer

    def _cancel(self, request_id: str, choice: int | None, reason: str) -> None:
        if choice is None:
            self._streams[request_id][1].close()
        else:
            self._streams[request_id][1].stop(choice)

    def _forget(self, request_id: str) -> None:
        outer, inner, replica = self._streams.pop(request_id)
        inner.close()
        replica.in_flight -= inner._n

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make a control call on the whole fleet. See FleetControl. Raises NotLeader if another gateway leads."""
        self.membership.leadership.require()
        return await self._control.call(args)

    async def abort_open(self, bound_s: float) -> None:
        """Abort every open request, at the end of this process."""
        self.closing.set()
        for outer, _, _ in list(self._streams.values()):
            outer.fail(errors.EngineDead("the server is shutting down"))
