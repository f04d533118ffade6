"""One connection to the engine, as EngineClient uses it: ZMQ in an API server, a queue in the offline LLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from fastdeploy.inter_communicator.messages import ToClient, ToEngine


class Connection(Protocol):
    """A connection under an identity of its own. Closed once it is lost: another one is made to reconnect."""

    def send(self, message: ToEngine) -> None:
        """Queue ``message`` without blocking."""
        ...

    def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine in order, and end when the connection is lost. Raises EngineError instead
        where the connection knows why."""
        ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Makes connections, one after the other."""

    def connect(self) -> Connection | None:
        """A new connection. None: there will never be an engine again. Raises OSError where a later try may succeed."""
        ...

    def close(self) -> None:
        """Free what the connections shared. Called once they are closed."""
        ...
