"""The supervisor with real API servers and a scripted engine. Each process is killed in several ways."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from e2e.server import until
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.entrypoints.child import REFUSED
from fastdeploy.entrypoints.ports import Port
from fastdeploy.entrypoints.process_tree import MAX_FAILED_STARTS, BackOff
from fastdeploy.entrypoints.replica_main import ReplicaConfig, ReplicaSupervisor
from fastdeploy.entrypoints.supervisor import Supervisor
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY

TESTS = Path(__file__).parents[1]


class Tree:
    """A supervisor with its children. name: selects the behaviour of the engine, see support/fake_engine_main.py. root:
    parent of the socket folder."""

    def __init__(
        self, name: str = "tiny", workers: int = 1, shutdown_s: float = 10.0, nohup: bool = False, fleet_key: str = ""
    ):
        self.root = tempfile.mkdtemp(prefix="fdt-")
        env = os.environ | {
            "FASTDEPLOY_IPC_ROOT": self.root,
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
            FLEET_KEY: fleet_key,
        }
        command = [
            sys.executable,
            str(TESTS / "support" / "supervisor_main.py"),
            *(self.root, name, str(workers), str(shutdown_s)),
        ]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in clean_up)
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL),
        )  # fmt: skip

    def wait_serving(self) -> Tree:
        line = self.process.stdout.readline()
        self.url = re.search(r"http://\S+", line).group()
        self.http = httpx.Client(base_url=self.url, timeout=20)
        return self

    def get(self, path: str) -> httpx.Response:
        """Send a request on a new connection, since an open one may belong to a killed API server."""
        return httpx.get(self.url + path, timeout=20, headers={"Connection": "close"})

    def engine_pid(self) -> int:
        return self.until(lambda: self.get("/v1/is_paused"))["result"]["pid"]

    def until(self, call, timeout_s: float = 30.0) -> dict:
        """Repeat the call until its status is 200, and return the body."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply = call()
                if reply.status_code == 200:
                    return reply.json()
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "no call returned status 200"

    def children(self) -> dict[int, str]:
        """Return the command lines of all processes below this supervisor, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if parent == self.process.pid or (self.root in command and "supervisor_main" not in command):
                    found[int(entry.name)] = command
        return found

    def sockets(self) -> list[str]:
        return os.listdir(self.root)

    def left(self) -> list[object]:
        """Return all child processes and socket folders."""
        return [*self.children().values(), *self.sockets()]

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def clean_up(self) -> None:
        for pid in [self.process.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.log.seek(0)
        print(self.log.read())
        self.log.close()
        shutil.rmtree(self.root)


@pytest.fixture
def tree():
    """Starts trees, and cleans them up at the end."""
    with contextlib.ExitStack() as stack:

        def start(*args, **kwargs) -> Tree:
            tree = Tree(*args, **kwargs)
            stack.callback(tree.clean_up)
            return tree

        yield start


def wait_gone(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 20)[0], f"{pid} is alive"
    os.close(fd)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_stop_signal_ends_all_processes_with_status_0(tree, number):
    t = tree(workers=2).wait_serving()
    assert t.http.post("/v1/completions", json={"prompt": [1]}).status_code == 200
    assert len(t.children()) == 3 and len(t.sockets()) == 1
    assert t.stop(number) == 0
    assert not t.left()


def test_only_the_engine_inherits_the_fleet_key(tree):
    key = "k" * 40
    t = tree(workers=2, fleet_key=key).wait_serving()
    has_key = {pid: key.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in t.children()}
    assert has_key == {pid: pid == t.engine_pid() for pid in t.children()} and len(has_key) == 3
    assert not any(key in command for command in t.children().values())


def test_a_replica_reports_where_each_engine_listens_for_the_fleet():
    port = Port.open("127.0.0.1", 0)
    events = Mock()
    config = ReplicaConfig(EngineConfig(model="m"), ServeConfig(model="m"))
    supervisor = ReplicaSupervisor(events, config, ports=[port])
    engine, server = Mock(), Mock()
    engine.name, server.name = "engine", "api-0"
    supervisor._on_event(engine, {"event": "ready", "fleet_endpoint": "tcp://127.0.0.1:1"})
    supervisor._on_event(server, {"event": "ready"})
    supervisor._on_event(engine, {"event": "ready", "fleet_endpoint": "tcp://127.0.0.1:2"})
    sent = [(call.args, call.kwargs["endpoint"]) for call in events.send.call_args_list]
    assert sent == [(("serving",), "tcp://127.0.0.1:1"), (("serving",), "tcp://127.0.0.1:2")]
    port.close()


def test_a_killed_engine_fails_open_requests_and_restarts_with_a_new_boot_id(tree):
    t = tree("silent").wait_serving()
    pid, boot = t.engine_pid(), t.get("/health").json()["boot_id"]
    assert t.http.post("/v1/update_weights", json={"model_path": "/x"}).status_code == 200
    results: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: results.append(t.http.post("/v1/completions", json={"prompt": [1]})))
    thread.start()
    until(lambda: t.get("/v1/is_paused").json()["result"].get("num_asked"), 30, "the request is at the engine")
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert results[0].status_code == 503 and results[0].json()["error"]["code"] == "engine_dead"
    status = t.until(lambda: t.get("/v1/is_paused"))["result"]
    assert status["pid"] != pid and t.get("/health").json()["boot_id"] != boot
    assert status["lost_commit"] is True, "the new engine does not know that it has old weights"


@pytest.mark.slow
def test_an_engine_without_a_commit_restarts_without_a_lost_commit(tree):
    t = tree().wait_serving()
    os.kill(t.engine_pid(), signal.SIGKILL)
    t.until(lambda: t.get("/v1/is_paused"))
    assert t.until(lambda: t.get("/v1/is_paused"))["result"]["lost_commit"] is False
    for version in ("1", "0"):  # in the end, the weights are those of the start
        assert t.http.post("/v1/update_weights", json={"model_path": "/x", "version": version}).status_code == 200
    pid = t.engine_pid()
    os.kill(pid, signal.SIGKILL)
    t.until(lambda: t.get("/v1/is_paused"))
    status = t.until(lambda: t.get("/v1/is_paused"))["result"]
    assert (status["pid"] != pid, status["lost_commit"]) == (True, False)


def test_a_killed_api_server_is_replaced_on_the_same_port(tree):
    t = tree().wait_serving()
    engine = t.engine_pid()
    [server] = [pid for pid, command in t.children().items() if "api_server" in command]
    os.kill(server, signal.SIGKILL)
    wait_gone(server)
    # The supervisor keeps the listening socket, so this connection waits for the new server.
    assert t.until(lambda: t.get("/v1/is_paused"))["result"]["pid"] == engine
    assert server not in t.children()
    assert t.stop() == 0


def test_all_processes_end_when_the_supervisor_is_killed(tree):
    t = tree(workers=2).wait_serving()
    assert len(t.children()) == 3
    t.process.kill()
    t.process.wait()
    until(lambda: not t.left(), 30, "nothing is left")


@pytest.mark.slow
def test_an_engine_that_was_ready_is_always_replaced_however_often_it_dies(tree):
    """So a client that can kill the engine cannot end the server. The log, and a metric of the engine, tell of it."""
    t = tree().wait_serving()
    killed = set()
    for _ in range(MAX_FAILED_STARTS + 2):
        pid = t.engine_pid()
        while pid in killed:
            pid = t.engine_pid()
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    assert t.until(lambda: t.http.post("/v1/completions", json={"prompt": [1]}))["choices"]
    assert t.until(lambda: t.get("/v1/is_paused"))["result"]["short_lives"] == len(killed)
    assert t.stop() == 0
    t.log.seek(0)
    told = re.findall(r" C supervisor.* engine has ended (\d+) times in a row .* SIGKILL", t.log.read())
    assert told == [str(number) for number in range(MAX_FAILED_STARTS, len(killed) + 1)]


@pytest.mark.slow
def test_the_server_ends_with_an_error_if_no_new_engine_becomes_ready(tree):
    t = tree("once").wait_serving()
    os.kill(t.engine_pid(), signal.SIGKILL)
    assert t.process.wait(30) != 0
    assert not t.left()


@pytest.mark.slow
def test_a_hangup_under_nohup_is_ignored(tree):
    t = tree(nohup=True).wait_serving()
    for pid in [t.process.pid, *t.children()]:
        os.kill(pid, signal.SIGHUP)
    assert t.http.post("/v1/completions", json={"prompt": [1]}).status_code == 200
    assert t.stop() == 0


def test_a_hangup_without_nohup_stops_the_server(tree):
    t = tree().wait_serving()
    assert t.stop(signal.SIGHUP) == 0


def test_a_refused_model_ends_the_server_at_once(tree):
    t = tree("broken")
    assert t.process.wait(30) == REFUSED
    t.log.seek(0)
    assert t.log.read() == f"fastdeploy: cannot serve {t.root}: config.json: is broken\n"
    assert not t.left()


@pytest.mark.slow
def test_an_engine_that_ignores_the_stop_signal_is_killed_after_shutdown_s(tree):
    t = tree("stubborn", shutdown_s=1.0).wait_serving()
    assert t.stop() == 1
    assert not t.left()


@pytest.mark.slow
def test_a_child_that_cannot_be_killed_is_left_behind(tree):
    """A process with a thread in a read from a dead mount does not end. Its parent must not wait for ever."""
    t = tree("immortal", shutdown_s=0.5).wait_serving()
    assert t.stop() == 1
    t.log.seek(0)
    assert re.search(r"engine \(process \d+\) cannot be killed", t.log.read())
    assert ["fake_engine_main" in command for command in t.children().values()] == [True]


@pytest.mark.slow
def test_a_server_whose_engine_has_died_but_cannot_end_stops_and_says_so(tree):
    t = tree().wait_serving()
    os.kill(t.engine_pid(), signal.SIGUSR1)
    assert t.process.wait(30) == 1
    t.log.seek(0)
    assert "the engine has died, but its process cannot end" in t.log.read()
    assert not t.left()


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(tree):
    t = tree("stubborn", shutdown_s=1000.0).wait_serving()
    t.process.send_signal(signal.SIGINT)
    [engine] = [pid for pid, command in t.children().items() if "fake_engine_main" in command]
    for pid in set(t.children()) - {engine}:
        wait_gone(pid)
    assert t.process.poll() is None
    assert t.stop() == 1
    assert not t.left()


def test_each_restart_waits_longer_until_a_child_was_ready_for_long():
    back_off = BackOff(first_delay_s=1.0)
    assert [back_off.delay(5.0) for _ in range(8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [back_off.delay(5.0) for _ in range(1000)] == [30.0] * 1000, "it gave up on a child that was ready"
    assert [back_off.delay(60.0), back_off.delay(5.0)] == [0.0, 1.0]


@pytest.mark.parametrize(("settings", "longest"), [({"faults": "on"}, 1.0), ({"faults_dir": "/f"}, 1.0), ({}, 30.0)])
def test_restarts_wait_no_longer_than_at_first_where_faults_are_on(settings, longest):
    tree = Supervisor(EngineConfig(model="m"), ServeConfig(model="m", **settings))
    assert max(tree._back_offs["engine"].delay(5.0) for _ in range(20)) == longest


def test_only_failed_starts_in_a_row_end_the_restarts():
    back_off = BackOff(first_delay_s=1.0)
    for _ in range(MAX_FAILED_STARTS - 1):
        assert back_off.delay(None) is not None
    assert back_off.delay(0.1) is not None
    for _ in range(MAX_FAILED_STARTS - 1):
        assert back_off.delay(None) is not None
    assert back_off.delay(None) is None
