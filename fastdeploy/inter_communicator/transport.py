"""Interface of a transport between the engine's loop and its clients."""

from __future__ import annotations

from typing import Protocol

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
