"""The end at which a gateway listens for the other gateways of its fleet: a Transport for an event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol

import zmq

from fastdeploy.inter_communicator.messages import Malformed, ToClient, ToEngine
from fastdeploy.inter_communicator.transport import InprocTransport
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport

Messages = list[tuple[str, ToEngine | Malformed]]


class PeerTransport(Protocol):
    """See transport.Transport. endpoint: the address at which other gateways reach this one."""

    endpoint: str

    async def receive(self) -> Messages:
        """Return all (client id, message) that are there, in order, as soon as there is one."""
        ...

    def send(self, client: str, message: ToClient) -> bool:
        """Queue ``message`` without blocking. False: the client has disconnected."""
        ...

    def close(self) -> None: ...


class ZmqPeerTransport(ZmqRouterTransport):
    """Over a unix socket, or over TCP with the fleet key (see ZmqRouterTransport). Make it in the event loop."""

    def __init__(self, endpoint: str, secret: str | None = None):
        over_tcp = endpoint.startswith("tcp://")
        super().__init__("" if over_tcp else endpoint, endpoint if over_tcp else "", secret)
        self.endpoint = self.fleet_endpoint or endpoint
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.get(zmq.FD), self._readable.set)

    async def receive(self) -> Messages:
        """See PeerTransport."""
        while not (messages := self.recv(0)):
            self._readable.clear()
            await self._readable.wait()
        return messages

    def send(self, client: str, message: ToClient) -> bool:
        """See Transport."""
        sent = super().send(client, message)
        self._readable.set()  # ZMQ may have taken in new messages meanwhile, for which it gives no signal then
        return sent

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.get(zmq.FD))
        super().close()


class InprocPeerTransport(InprocTransport):
    """For gateways in one event loop (see InprocTransport)."""

    def __init__(self, endpoint: str):
        super().__init__()
        self.endpoint = endpoint
        self._readable = asyncio.Event()

    def post(self, client: str, message: ToEngine) -> None:
        super().post(client, message)
        self._readable.set()

    async def receive(self) -> Messages:
        """See PeerTransport."""
        while not (messages := self.recv(0)):
            self._readable.clear()
            await self._readable.wait()
        return messages
