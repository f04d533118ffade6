"""The engine's door: what its single-threaded loop needs of a transport, and no more."""

from __future__ import annotations

from typing import Protocol

from fastdeploy.inter_communicator.messages import Malformed, ToClient, ToEngine


class Transport(Protocol):
    """Messages of one client arrive in the order they were sent, and so do those to it.

    Only :meth:`wake` may be called from another thread than the loop's.
    """

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        """Wait at most ``timeout_s`` seconds (None: for ever, 0: not at all) and return all (client id, message) that
        are there, in order; empty after a timeout or a wake."""
        ...

    def send(self, client: str, message: ToClient) -> bool:
        """Queue ``message`` without blocking. False: that client is gone and will never read it."""
        ...

    def wake(self) -> None:
        """Make a blocked or the next recv return; thread-safe."""
        ...

    def close(self) -> None: ...
