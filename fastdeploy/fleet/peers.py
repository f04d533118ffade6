"""The connections between the gateways of a fleet. Each one listens at an address, and answers there as an engine does:
Welcome, heartbeats, and a Reply to each Call. So a gateway speaks to another one with an EngineClient."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import FastDeployError, RequestError
from fastdeploy.core.process import VERSION, host_id
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import known_messages
from fastdeploy.inter_communicator.peer_transport import PeerTransport
from fastdeploy.inter_communicator.transport import Connector

logger = logging.getLogger(__name__)
BEATS_PER_STALL = 10


class PeerLink(NamedTuple):
    """The way between this gateway and the others. transport: at which this one listens. connector: makes the
    connector to the gateway at an address."""

    transport: PeerTransport
    connector: Callable[[str], Connector]


class Peers:
    """The other gateways. answer(gateway, args): answers a call of the gateway at that address. gone(gateway): called
    when a gateway is known to have ended."""

    def __init__(
        self,
        link: PeerLink,
        config: FleetConfig,
        answer: Callable[[str, m.Args], Awaitable[dict[str, Any]]],
        gone: Callable[[str], None],
    ):
        self._link = link
        self._transport = link.transport
        self._config = config
        self._answer = answer
        self._gone = gone
        self._boot_id = uuid.uuid4().hex
        self._callers: dict[str, m.Hello] = {}  # by the name of their connection
        self._clients: dict[str, EngineClient] = {}  # by address
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """The address at which other gateways reach this one."""
        return self._transport.endpoint

    def client(self, gateway: str) -> EngineClient:
        """Return the client of the gateway at an address. It is connected from its first use on."""
        if (client := self._clients.get(gateway)) is None:
            client = self._clients[gateway] = EngineClient(
                self._link.connector(gateway), self._config.stall_s, kills_stalled=False, gateway=self.endpoint
            )
            client.start()
        return client

    def probe(self) -> None:
        """Send a heartbeat to all callers. It finds out which ones have gone."""
        for caller in list(self._callers):
            self._send(caller, m.Heartbeat())

    async def run(self) -> None:
        """Answer the other gateways until this is cancelled."""
        beats = asyncio.create_task(self._beat(), name="peer-heartbeats")
        try:
            while True:
                for caller, message in await self._transport.receive():
                    self._handle(caller, message)
        finally:
            beats.cancel()

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._transport.close()

    # ------------------------------------------------------------------ inside

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.stall_s / BEATS_PER_STALL)
            self.probe()

    def _handle(self, caller: str, message: object) -> None:
        match message:
            case m.Hello():
                self._callers[caller] = message
                self._send(caller, m.Welcome(self._boot_id, os.getpid(), 0, VERSION, known_messages()))
                self._send(caller, m.Heartbeat())
            case _ if caller not in self._callers:
                self._transport.send(caller, m.Goodbye())
            case m.Call(args=m.ModelInfoArgs(), call_id=call_id):  # the first one of each connection
                self._send(caller, m.Reply(call_id, {}))
            case m.Call(args=args, call_id=call_id):
                answer = self._reply(caller, self._callers[caller].gateway, call_id, args)
                task = asyncio.get_running_loop().create_task(answer)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case m.Malformed(why=why, call_id=int(call_id)):
                failure = m.Failure(RequestError.code, f"this gateway cannot read the call: {why}")
                self._send(caller, m.Reply(call_id, {}, failure))
            case _:
                logger.error("a gateway sent a %s", type(message).__name__)

    async def _reply(self, caller: str, gateway: str, call_id: int, args: m.Args) -> None:
        result: dict[str, Any] = {}
        failure = None
        try:
            result = await self._answer(gateway, args)
        except FastDeployError as error:
            failure = m.Failure(error.code, error.message, error.detail)
        except Exception as error:
            logger.exception("a call of another gateway failed")
            why = f"internal error in the gateway that leads: {type(error).__name__}: {error}"
            failure = m.Failure(FastDeployError.code, why)
        self._send(caller, m.Reply(call_id, result, failure))

    def _send(self, caller: str, message: m.ToClient) -> None:
        if caller in self._callers and not self._transport.send(caller, message):
            hello = self._callers.pop(caller)
            if hello.host == host_id() and not Path(f"/proc/{hello.pid}").exists():
                self._gone(hello.gateway)
