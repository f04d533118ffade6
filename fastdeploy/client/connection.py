"""Interface of a client's connection to the engine: ZMQ in an API server, a queue in the offline LLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from fastdeploy.inter_communicator.messages import ToClient, ToEngine


class Connection(Protocol):
    """One connection, with an identity of its own. A client that has lost its connection makes a new one."""

    def send(self, message: ToEngine) -> None:
        """Queue ``message`` without blocking."""
        ...

    def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine in order, and end when the connection is lost, or raise an EngineError that
        says why."""
        ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Makes connections, one after the other."""

    def connect(self) -> Connection | None:
        """Return a new connection, or None if the engine has ended for ever. Raises OSError if a later try may
        succeed."""
        ...

    def close(self) -> None:
        """Free what the connections shared. Called once they are closed."""
        ...
