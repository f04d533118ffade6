"""Messages that the engine has not handled yet. During a step the engine searches them for a pause."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy.engine.pauses.holds import closes_whole_engine
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Transport


class Inbox:
    """The messages that wait, in the order in which they came. Used by the loop's thread only. may_pause(client):
    whether the engine takes pauses of this client.

    After an abandoned step, the next step is always completed. So frequent pauses cannot stop all progress.
    """

    def __init__(self, transport: Transport, may_pause: Callable[[str], bool] = lambda client: True):
        self._transport = transport
        self._may_pause = may_pause
        self._read: list[tuple[str, m.ToEngine | m.Malformed]] = []
        self._abandoned = False

    def receive(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine | m.Malformed]]:
        """Return all messages that wait to be handled. If there are none, wait as ``Transport.recv`` does."""
        read, self._read = self._read, []
        return read + self._transport.recv(0.0 if read else timeout_s)

    def pause_has_come(self) -> bool:
        """Return whether a pause has come for which the runner must abandon the step in flight. Called between two
        layers. :meth:`receive` returns the pause with the other messages later."""
        arrived = self._transport.recv(0.0)
        self._read += arrived
        wanted = any(
            isinstance(message, m.Call) and closes_whole_engine(message.args) and self._may_pause(client)
            for client, message in arrived
        )
        if self._abandoned or not wanted:
            return False
        self._abandoned = True
        return True

    def step_completed(self) -> None:
        """Allow the next step to be abandoned."""
        self._abandoned = False
