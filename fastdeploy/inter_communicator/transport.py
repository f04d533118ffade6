"""Interfaces of both ends of a transport between the engine's loop and its clients; and the transport to an engine in a
thread of the same process, for the offline LLM and for tests. ``zmq_transport`` has the one between processes."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from fastdeploy.core.errors import EngineDead, EngineError
from fastdeploy.inter_communicator.messages import Malformed, ToClient, ToEngine


class Transport(Protocol):
    """The engine's end. Messages from and to one client arrive in the order in which they were sent. Only :meth:`wake`
    may be called from another thread than the loop's."""

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        """Wait at most ``timeout_s`` seconds (None: for ever, 0: not at all), and return all (client id, message) that
        are there, in order. Empty after a timeout or a wake."""
        ...

    def send(self, client: str, message: ToClient) -> bool:
        """Queue ``message`` without blocking. False: the client has disconnected."""
        ...

    def wake(self) -> None:
        """Make a blocked recv return at once. If none is blocked, the next recv returns at once."""
        ...

    def close(self) -> None: ...


class Connection(Protocol):
    """The client's end: one connection, with an identity of its own. A client that has lost it makes a new one."""

    def send(self, message: ToEngine) -> None:
        """Queue ``message`` without blocking."""
        ...

    def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine in order, and end when the connection is lost, or raise an EngineError that
        says why."""
        ...

    def close(self) -> None: ...


class Connector(Protocol):
    """The maker of connections, one after the other."""

    def connect(self) -> Connection | None:
        """Return a new connection, or None if the engine has ended for ever. Raises OSError if a later try may
        succeed."""
        ...

    def close(self) -> None:
        """Free what the connections shared. Called once they are closed."""
        ...


class InprocTransport:
    """The engine's end (see Transport). Clients call :meth:`connect` in the thread of their event loop."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, ToEngine] | None] = queue.SimpleQueue()
        self._connections: dict[str, InprocConnection] = {}
        self._closed = False

    def connect(self) -> InprocConnection | None:
        """Return a connection for the running event loop; None once the engine has ended."""
        if self._closed:
            return None
        connection = InprocConnection(self)
        self._connections[connection.identity] = connection
        return connection

    def disconnect(self, client: str) -> None:
        self._connections.pop(client, None)

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        messages: list[tuple[str, ToEngine | Malformed]] = []
        try:
            item = self._inbox.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                if item is not None:
                    messages.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def send(self, client: str, message: ToClient) -> bool:
        if (connection := self._connections.get(client)) is None:
            return False
        connection.deliver(message)
        return True

    def post(self, client: str, message: ToEngine) -> None:
        """Give the engine a message of ``client``. May be called from any thread."""
        self._inbox.put((client, message))

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self, why: EngineError | None = None) -> None:
        """End all connections after the messages that were sent over them. why: the error that their readers raise."""
        self._closed = True
        for connection in list(self._connections.values()):
            connection.deliver(why or EngineDead("the engine was closed"))
        self._connections.clear()


class InprocConnection:
    """The client's end (see Connection)."""

    def __init__(self, transport: InprocTransport):
        self.identity = uuid.uuid4().hex
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._messages: deque[ToClient | EngineError] = deque()  # an error is the last item
        self._arrived = asyncio.Event()

    def send(self, message: ToEngine) -> None:
        self._transport.post(self.identity, message)

    def deliver(self, message: ToClient | EngineError) -> None:
        """Add a message, on the engine's thread. The event loop is woken once for all unread messages."""
        self._messages.append(message)
        if len(self._messages) == 1:
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine. Raises the error that InprocTransport.close was given."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._messages:
                # Removed only after its handling: deliver() wakes the loop only if it finds the queue empty.
                message = self._messages[0]
                if isinstance(message, EngineError):
                    raise message
                yield message
                self._messages.popleft()

    def close(self) -> None:
        """Disconnect. The next ``send`` of the engine to this client returns False."""
        self._transport.disconnect(self.identity)
