from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.server import until
from fastdeploy.core.process import is_alive
from fastdeploy.testing.process import ServerFailed, ServerProcess, reserved_port

pytestmark = pytest.mark.processes
# A server whose child leaves the process group, ignores SIGTERM, and so outlives its parent.
LEAKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
if os.fork() == 0:
    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); print("up", flush=True)
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def started(code: str) -> ServerProcess:
    server = ServerProcess([sys.executable, "-c", code])
    until(lambda: "up" in server.log(), 20, "the server is up")
    return server


def test_a_child_that_outlives_the_server_is_found_and_killed():
    with started(LEAKS) as server:
        pids = server.processes()
        assert len(pids) == 2 and server.pid in pids
        assert server.stop() == 3
        assert server.processes() == [pid for pid in pids if pid != server.pid]
        server.kill()
        assert server.processes() == [] and not any(map(is_alive, pids))


def test_a_server_that_does_not_stop_has_no_exit_status_and_is_killed_at_the_end():
    server = started(DEAF)
    try:
        assert server.stop(timeout_s=0.2) is None
    finally:
        server.close()
    assert server.poll() == -signal.SIGKILL and not is_alive(server.pid)
    assert not server.ipc.parent.exists()


# A program that starts a server in a thread that ends at once, tells the process ids, and waits.
PROGRAM = """
import sys, threading, time
from fastdeploy.testing import ServerProcess
servers = []
def start():
    servers.append(ServerProcess([sys.executable, "-c", sys.argv[1]]))
thread = threading.Thread(target=start)
thread.start()
thread.join()
while "up" not in servers[0].log():
    time.sleep(0.01)
print(servers[0].ipc.parent, *servers[0].processes(), servers[0]._guard.pid, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_server_when_the_program_that_started_it_dies():
    command = [sys.executable, "-c", PROGRAM, LEAKS]
    left: list[tuple[str, list[str]]] = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            folder, *pids = program.stdout.readline().split()
            assert len(pids) == 3 and all(is_alive(int(pid)) for pid in pids) and os.path.isdir(folder)
            left.append((folder, pids))
            program.send_signal(number)
    for folder, pids in left:
        until(lambda pids=pids: not any(is_alive(int(pid)) for pid in pids), 20, "all processes have ended")
        assert not os.path.exists(folder)


def test_a_server_ends_when_its_guard_is_killed():
    with started(DEAF) as server:
        os.kill(server._guard.pid, signal.SIGKILL)
        assert server.wait(20) == -signal.SIGKILL
        until(lambda: not is_alive(server.pid), 20, "the server has ended")
    assert not server.ipc.parent.exists()


def test_servers_that_start_at_once_have_ports_of_their_own_where_they_can_listen():
    code = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), None).serve_forever()"
    with ThreadPoolExecutor(4) as pool:
        servers = list(pool.map(lambda _: ServerProcess([sys.executable, "-c", code]), range(4)))
    others = [reserved_port() for _ in range(50)]
    try:
        ports = [server.port for server in servers] + [other.getsockname()[1] for other in others]
        assert len(set(ports)) == len(ports)
        for server in servers:
            until(lambda server=server: _listens(server), 20, "the server listens")
    finally:
        for one in [*servers, *others]:
            one.close()


def _listens(server: ServerProcess) -> bool:
    server.require_running()
    import socket

    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", server.port)) == 0


def test_a_failed_start_tells_the_exit_status_and_the_end_of_the_log():
    exits = [sys.executable, "-c", "raise SystemExit('no such model')"]
    for command, why in (
        (exits, "1; its log ends:\nno such model"),
        (["/no/such"], "127; its log ends:\n/no/such: No"),
    ):
        with ServerProcess(command) as server, pytest.raises(ServerFailed, match=f"ended with status {why}"):
            server.wait_ready(20)


def test_a_log_with_a_name_is_kept(tmp_path):
    with ServerProcess([sys.executable, "-c", "print('up')"], log=tmp_path / "log") as server:
        server.wait()
    assert (tmp_path / "log").read_text() == "up\n"


def test_a_wait_in_one_thread_does_not_hide_the_end_from_another():
    with started(LEAKS) as server:
        found: list[int | None] = []
        waiting = [threading.Thread(target=lambda: found.append(server.wait()), daemon=True) for _ in range(2)]
        for thread in waiting:
            thread.start()
        server.stop()
        for thread in waiting:
            thread.join(20)
        assert found == [3, 3], "a process that outlives the server must not delay its exit status"
