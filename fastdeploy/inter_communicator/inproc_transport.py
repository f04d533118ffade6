"""The engine in a thread of the same process: for the offline LLM class and for tests."""

from __future__ import annotations

import queue
from collections.abc import Callable

from fastdeploy.inter_communicator.messages import Fence, FenceAck, ToClient, ToEngine


class InprocTransport:
    """The engine's end (see transport.Transport). Clients come from :meth:`connect`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, ToEngine] | None] = queue.SimpleQueue()
        self._clients: dict[str, InprocClient] = {}

    def connect(self, name: str, receive: Callable[[ToClient], None]) -> InprocClient:
        """A client whose messages go to ``receive``, on the engine's thread, which it must not block."""
        client = self._clients[name] = InprocClient(self, name, receive)
        return client

    def disconnect(self, name: str) -> None:
        self._clients.pop(name, None)

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine]]:
        messages: list[tuple[str, ToEngine]] = []
        try:
            first = self._inbox.get(timeout=timeout_s) if timeout_s != 0 else self._inbox.get_nowait()
            while True:
                if first is not None:
                    messages.append(first)
                first = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def send(self, client: str, message: ToClient) -> bool:
        if (target := self._clients.get(client)) is None:
            return False
        target.deliver(message)
        return True

    def post(self, client: str, message: ToEngine) -> None:
        """Called by clients, from any thread."""
        self._inbox.put((client, message))

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._clients.clear()


class InprocClient:
    """The client's end. A fence is acknowledged here, once ``receive`` has taken everything before it."""

    def __init__(self, transport: InprocTransport, name: str, receive: Callable[[ToClient], None]):
        self.name = name
        self._transport = transport
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        self._transport.post(self.name, message)

    def deliver(self, message: ToClient) -> None:
        if isinstance(message, Fence):
            self.send(FenceAck(fence_id=message.fence_id))
        else:
            self._receive(message)

    def close(self) -> None:
        """The engine finds this client gone with its next message to it."""
        self._transport.disconnect(self.name)
