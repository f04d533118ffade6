"""What has arrived at the engine and is not handled yet; it is looked at within a step too, for a pause."""

from __future__ import annotations

from fastdeploy.engine.pause import leaves_no_use_for_a_step
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Transport


class StepAbandoned(Exception):
    """A pause has come that nothing of the step in flight may be seen after: it need not be computed to the end."""


class Inbox:
    """Messages in the order they came. Used by the loop's thread only.

    A step that is done again is not abandoned again: however often somebody pauses, every second step is completed.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._read: list[tuple[str, m.ToEngine]] = []
        self._abandoned = False

    def take(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine]]:
        """All that is there to be handled; if there is nothing, wait for it as ``Transport.recv`` does."""
        read, self._read = self._read, []
        return read + self._transport.recv(0.0 if read else timeout_s)

    def look_for_pause(self) -> None:
        """Called between two layers. Raises StepAbandoned; the pause that did it is among what :meth:`take` returns."""
        arrived = self._transport.recv(0.0)
        self._read += arrived
        if not self._abandoned and any(_pauses(message) for _, message in arrived):
            self._abandoned = True
            raise StepAbandoned

    def step_completed(self) -> None:
        self._abandoned = False


def _pauses(message: m.ToEngine) -> bool:
    return isinstance(message, m.Call) and leaves_no_use_for_a_step(message.args)
