"""Messages that have arrived at the engine and are not handled yet. Within a step they are searched for a pause."""

from __future__ import annotations

from fastdeploy.engine.pause import leaves_no_use_for_a_step
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Transport


class Inbox:
    """Messages in the order they came. Used by the loop's thread only.

    A step that is done again is not abandoned again: however often somebody pauses, every second step is completed.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._read: list[tuple[str, m.ToEngine | m.Malformed]] = []
        self._abandoned = False

    def take(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine | m.Malformed]]:
        """Return all messages that are to be handled. If there are none, wait as ``Transport.recv`` does."""
        read, self._read = self._read, []
        return read + self._transport.recv(0.0 if read else timeout_s)

    def pause_has_come(self) -> bool:
        """Whether a pause has come that nothing of the step in flight may be seen after: the step is to be given up.
        Called between two layers. :meth:`take` returns the pause with the other messages."""
        arrived = self._transport.recv(0.0)
        self._read += arrived
        if self._abandoned or not any(_pauses(message) for _, message in arrived):
            return False
        self._abandoned = True
        return True

    def step_completed(self) -> None:
        """Take note that the step ran to its end: the next one may be given up again."""
        self._abandoned = False


def _pauses(message: m.ToEngine | m.Malformed) -> bool:
    return isinstance(message, m.Call) and leaves_no_use_for_a_step(message.args)
