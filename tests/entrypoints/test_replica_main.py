"""A replica with a scripted engine: what it tells its parent, and how it is killed as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import until
from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.core.process import descendants, host_id, is_alive
from fastdeploy.entrypoints.child import REFUSED, Child, EventPipe, EventReader
from fastdeploy.entrypoints.ports import Port
from fastdeploy.entrypoints.replica_main import ReplicaConfig

TESTS = Path(__file__).parents[1]
ALIVE = {"event": "alive"}


class Replica:
    """A replica below this process. kind: behaviour of the engine, see support/fake_engine_main.py."""

    def __init__(self, root: str, kind: str = "tiny", stall_s: float = 60.0):
        self.port = Port.open("127.0.0.1", 0)
        fd = self.port.sockets[0].fileno()
        engine = EngineConfig(model=root, served_model_name=kind)
        serve = ServeConfig(model=root, served_model_name=kind, shutdown_s=5.0, stall_s=stall_s)
        args = ["--name", "replica-7", "--config", to_json(ReplicaConfig(engine, serve))]
        args += ["--engine-module", "support.fake_engine_main", "--http-fds", str(fd)]
        self.child = Child(
            "replica-7",
            "fastdeploy.entrypoints.replica_main",
            args,
            [fd],
            signal.SIGKILL,
            environment=os.environ | {"FASTDEPLOY_IPC_ROOT": root, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
            whole_group=True,
        )
        self._events: list[dict[str, Any]] = []

    def event(self) -> dict[str, Any]:
        """Return the next event that is not "alive"."""
        while (event := self.any_event()) == ALIVE:
            continue
        return event

    def any_event(self) -> dict[str, Any]:
        while not self._events:
            assert select.select([self.child.events.fd], [], [], 30)[0], "no event"
            self._events += self.child.events.read()
        return self._events.pop(0)

    def processes(self) -> list[int]:
        return [self.child.pid, *descendants(self.child.pid)]

    def engine_pid(self) -> int:
        return httpx.get(f"{self.port.url}/v1/is_paused", timeout=20).json()["result"]["pid"]

    def close(self) -> None:
        self.child.kill()
        self.child.reap()
        self.port.close()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    root = tempfile.mkdtemp(prefix="fdt-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)

        def start(*options: Any) -> Replica:
            replica = Replica(root, *options)
            stack.callback(replica.close)
            return replica

        yield start


def test_a_replica_tells_when_it_serves_and_again_after_its_engine_died(replica):
    one = replica()
    serving = {"event": "serving", "url": one.port.url, "endpoint": "", "host": host_id()}
    assert one.event() == serving
    engine = one.engine_pid()
    os.kill(engine, signal.SIGKILL)
    assert one.event() == serving
    until(lambda: httpx.get(f"{one.port.url}/health", timeout=20).status_code == 200, 20, "it serves again")
    assert one.engine_pid() != engine


def test_a_replica_says_that_it_is_alive_from_its_start_on(replica):
    one = replica("tiny", 1.0)
    assert [one.any_event(), one.event()["event"]] == [ALIVE, "serving"]
    for _ in range(2):
        while one.any_event() != ALIVE:  # on a busy machine the engine may be taken for a silent one, and serve again
            continue


def test_a_full_pipe_does_not_stop_the_one_who_says_that_it_is_alive():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    events = EventPipe(writer)
    for _ in range(1000):
        events.beat()
    os.close(writer)
    events = EventReader(reader)
    said = events.read()
    events.close()
    assert 1 < len(said) < 1000 and said == [ALIVE] * len(said)


def test_a_replica_whose_processes_are_stopped_is_killed_as_a_whole(replica):
    one = replica()
    one.event()
    processes = one.processes()
    assert len(processes) == 3, "a supervisor, an engine and an API server"
    os.killpg(one.child.pid, signal.SIGSTOP)
    one.child.kill()
    until(lambda: not any(map(is_alive, processes)), 20, "all are gone")


def test_the_death_of_the_supervisor_alone_ends_the_rest_when_it_is_reaped(replica):
    one = replica()
    one.event()
    processes = one.processes()
    os.kill(one.child.pid, signal.SIGKILL)
    select.select([one.child.pidfd], [], [], 20)
    one.child.kill()  # as reap does
    until(lambda: not any(map(is_alive, processes)), 20, "all are gone")


def test_a_model_that_is_refused_is_told_with_the_reason(replica):
    one = replica("broken")
    assert one.event() == {"event": "refused", "why": "config.json: is broken"}
    select.select([one.child.pidfd], [], [], 20)
    assert os.waitid(os.P_PIDFD, one.child.pidfd, os.WEXITED | os.WNOWAIT).si_status == REFUSED
