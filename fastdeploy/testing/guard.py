"""The process between a program and the server that it starts. All processes of the server end with the program.

    python -I -S guard.py PROGRAM STATUS_FD FOLDER COMMAND...

PROGRAM: process id of the program, the parent of the guard. STATUS_FD: gets a line with the server's process id, and
one with its exit status when it has ended (negative: a signal); then it is closed. FOLDER: removed at the end.

The guard is the subreaper of the server (see prctl(2)): a process of the server whose parent has ended becomes a child
of the guard, also if it is in another session. So the guard can kill all of them, and no other process.

If the program dies, the server gets SIGTERM and STOP_S seconds, and what is left then is killed. SIGTERM to the guard
kills all at once. The guard ends after that, and not before, since only the guard removes the folder.

Uses the standard library only, and little of it, to start in 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_S, KILL_S = 5.0, 10.0
NOT_FOUND = 127  # exit status of a shell for a command that cannot be run
_prctl = ctypes.CDLL(None).prctl


class Guard:
    """The server and its descendants."""

    def __init__(self, status_fd: int, command: list[str]):
        self._status_fd = status_fd
        self._wake, wake_writer = os.pipe()
        for fd in (self._wake, wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._runs = True
        self._server = os.fork()
        if self._server == 0:
            _become(command)
        self._report(self._server)

    def watch(self, program_fd: int) -> None:
        """Return when the program has died, or when the guard has got SIGTERM. program_fd: a pidfd. The server gets
        time for an orderly end in the first case."""
        while True:
            ended = program_fd in select.select([program_fd, self._wake], [], [])[0]
            signals = self._signals()
            self._reap()
            if signal.SIGTERM in signals:
                return
            if ended:
                self._stop()
                return

    def kill(self) -> None:
        """Kill all, and return when they have ended. A process that cannot be killed is left after KILL_S."""
        deadline = time.monotonic() + KILL_S
        while self._reap() and time.monotonic() < deadline:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self._wake], [], [], 0.1)
            self._signals()

    def _stop(self) -> None:
        deadline = time.monotonic() + STOP_S
        if self._runs:
            os.kill(self._server, signal.SIGTERM)
        while self._reap() and (left := deadline - time.monotonic()) > 0:
            select.select([self._wake], [], [], left)
            self._signals()

    def _reap(self) -> bool:
        """Collect all that have ended. Return whether any process is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._server:
                    self._runs = False
                    self._report(os.waitstatus_to_exitcode(status))
                    os.close(self._status_fd)
        return False

    def _signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._wake, 4096)
        return b""

    def _report(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the program has died
            os.write(self._status_fd, b"%d\n" % number)


def _become(command: list[str]) -> None:
    """Run the command in place of this process, in a session of its own. The system kills it if the guard dies."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def main() -> None:
    program, status_fd, folder, *command = sys.argv[1:]
    os.set_inheritable(int(status_fd), False)  # while the server held it, too, the program would not see it closed
    with contextlib.suppress(ProcessLookupError):
        program_fd = os.pidfd_open(int(program))
        if os.getppid() == int(program):  # else the program died before
            guard = Guard(int(status_fd), command)
            guard.watch(program_fd)
            guard.kill()
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
