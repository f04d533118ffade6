"""The engine in a thread of the same process: for the offline LLM class and for tests."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections import deque
from collections.abc import AsyncIterator

from fastdeploy.core.errors import EngineDead, EngineError
from fastdeploy.inter_communicator.messages import Malformed, ToClient, ToEngine


class InprocTransport:
    """The engine's end (see transport.Transport). Clients come from :meth:`connect`, in the thread of an event loop."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, ToEngine] | None] = queue.SimpleQueue()
        self._connections: dict[str, InprocConnection] = {}
        self._closed = False

    def connect(self) -> InprocConnection | None:
        """A connection for the running event loop; None once the engine has ended."""
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
            first = self._inbox.get(timeout=timeout_s) if timeout_s != 0 else self._inbox.get_nowait()
            while True:
                if first is not None:
                    messages.append(first)
                first = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def send(self, client: str, message: ToClient) -> bool:
        if (connection := self._connections.get(client)) is None:
            return False
        connection.deliver(message)
        return True

    def post(self, client: str, message: ToEngine) -> None:
        """Called by clients, from any thread."""
        self._inbox.put((client, message))

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self, why: EngineError | None = None) -> None:
        """End all connections, each after the last message that was sent over it. why: what their readers raise."""
        self._closed = True
        for connection in list(self._connections.values()):
            connection.deliver(why or EngineDead("the engine was closed"))
        self._connections.clear()


class InprocConnection:
    """The client's end, as client.connection.Connection has it."""

    def __init__(self, transport: InprocTransport):
        self.identity = uuid.uuid4().hex
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._messages: deque[ToClient | EngineError] = deque()  # an error is the last one
        self._arrived = asyncio.Event()

    def send(self, message: ToEngine) -> None:
        self._transport.post(self.identity, message)

    def deliver(self, message: ToClient | EngineError) -> None:
        """Called by the engine's thread. The event loop is woken once for all messages that it has not yet seen."""
        self._messages.append(message)
        if len(self._messages) == 1:
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine; raises what InprocTransport.close was given."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._messages:
                # Removed after it was handled: deliver() wakes the loop only for a message that finds none before it.
                message = self._messages[0]
                if isinstance(message, EngineError):
                    raise message
                yield message
                self._messages.popleft()

    def close(self) -> None:
        """The engine finds this client gone with its next message to it."""
        self._transport.disconnect(self.identity)
