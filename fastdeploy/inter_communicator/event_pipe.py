"""One-way JSON lines from a child process to its supervisor, over an inherited pipe."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Any

import msgspec

from fastdeploy.core.errors import shortened

REFUSED = 2  # exit status of a process whose model or settings cannot be served: a restart would not help
MAX_WHY = 500  # characters


class EventPipe:
    """The child's end. A line is shorter than PIPE_BUF, so it is written as a whole. A supervisor that has ended is no
    error."""

    def __init__(self, fd: int):
        self._fd = fd
        os.set_inheritable(fd, False)

    def send(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode({"event": event, **fields}) + b"\n")

    def beat(self) -> None:
        """Send "alive", unless the pipe is full because the supervisor does not read."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if poll.poll(0):
            self.send("alive")

    def refuse(self, error: Exception) -> int:
        """Report why nothing can be served, and return the exit status."""
        self.send("refused", why=shortened(" ".join(str(error).split()), MAX_WHY))
        return REFUSED


class EventReader:
    """The supervisor's end. ``fd`` is non-blocking, for a selector."""

    def __init__(self, fd: int):
        os.set_blocking(fd, False)
        self.fd = fd
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the events of all complete lines that are there."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, 65536):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [msgspec.json.decode(line) for line in lines]

    def close(self) -> None:
        os.close(self.fd)
