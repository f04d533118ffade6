"""A runner behind real sockets, in a thread of the test's process."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable

from fastdeploy.core.runner import Runner
from fastdeploy.inter_communicator.remote_runner import RemoteRunner
from fastdeploy.inter_communicator.runner_server import RunnerServer


def serve_in_thread(runner: Runner) -> tuple[RemoteRunner, Callable[[], None]]:
    """Serve ``runner``; returns it as the engine sees it, and what ends the thread. The server offers a tick whenever
    the runner does, so that nothing depends on time."""
    folder, died_fd = tempfile.mkdtemp(), os.eventfd(0)
    thread = threading.Thread(target=RunnerServer(folder, tick_s=0).serve, args=(lambda: runner,), daemon=True)
    thread.start()

    def closed() -> None:
        thread.join(30)
        os.eventfd_write(died_fd, 1)  # calls that were left behind end, before the number means another file
        for caller in threading.enumerate():
            if caller.name == "stage-weights":
                caller.join(30)
        shutil.rmtree(folder)
        os.close(died_fd)

    remote = RemoteRunner(folder, died_fd, closed)
    return remote, remote.close
