"""One child process of a parent that watches it, and the pipe for its events: one-way JSON lines."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastdeploy.core.errors import shortened
from fastdeploy.core.process import stat_of

logger = logging.getLogger(__name__)
REFUSED = 2  # exit status of a process whose model or settings cannot be served: a restart would not help
MAX_WHY = 500  # characters
KILLED_S = 30.0  # in which a process that was killed ends; the system may need seconds to free its memory
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


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


class Child:
    """A running ``python -m module args --event-fd N``. ``pidfd`` becomes readable when the process has ended, and
    ``events.fd`` when the process has sent an event. ready_since: time.monotonic() when the child became ready.

    The child has its own session, so Ctrl-C reaches the supervisor only, which ends its children in order. own_session:
    False = the child stays in the process group of this process. death_signal: the system sends it to the child when
    the parent dies; None = the child watches the parent itself. whole_group: children of the child stay in its process
    group, which is killed as a whole: by :meth:`kill`, and when the child itself has ended.
    """

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        keep_fds: Sequence[int] = (),
        death_signal: signal.Signals | None = None,
        *,
        environment: Mapping[str, str],
        own_session: bool = True,
        whole_group: bool = False,
    ):
        assert own_session or not whole_group, "this process is in the same group"
        self._whole_group = whole_group
        read_fd, write_fd = os.pipe()
        parent = os.getpid()

        def tie_to_parent() -> None:
            if death_signal is None:
                return
            _libc.prctl(_PR_SET_PDEATHSIG, death_signal)
            if os.getppid() != parent:  # the parent died before the call of prctl
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args, "--event-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[write_fd, *keep_fds],
                start_new_session=own_session,
                preexec_fn=tie_to_parent,
            )
        finally:
            os.close(write_fd)
        self.name = name
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.events = EventReader(read_fd)
        self.ready_since: float | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. It is no error if the child has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill the child, even if its process is stopped. It is no error if the child has ended already."""
        if self._whole_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so no other group has this number
        else:
            self.signal(signal.SIGKILL)

    def main_thread_ended(self) -> bool:
        """Return whether the main thread has ended, though another thread may still run."""
        with contextlib.suppress(OSError):
            return stat_of(self.pid)[0] in "ZX"
        return False

    def reap(self) -> int:
        """Wait for the end of a child that was killed, or whose pidfd is readable. Return its exit status (negative: a
        signal). A process with a thread in a call that cannot be interrupted, such as a read from a dead mount, does
        not end: it is left behind after KILLED_S, with an error in the log."""
        ended = bool(select.select([self.pidfd], [], [], KILLED_S)[0])
        if self._whole_group:
            self.kill()
        if ended:
            status = self._process.wait()
        else:
            status = -signal.SIGKILL
            text = "%s (process %d) cannot be killed and is left behind: it waits for a file, on a dead mount perhaps"
            logger.error(text, self.name, self.pid)
        os.close(self.pidfd)
        self.events.close()
        return status
