from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.processes import (
    PeakMemory,
    ServerProcess,
    cpu_seconds,
    peak_bytes,
    reset_peak,
    resident_bytes,
    send_all,
    session_processes,
)
from e2e.server import until
from fastdeploy.engine.requests.delivery import process_runs

SPINS = "import os\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\nwhile True: pass"


@pytest.fixture
def spinning() -> Iterator[tuple[int, list[int]]]:
    """Start a session of two processes that use CPU; give (leader, both)."""
    leader = subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert leader.stdout is not None
        yield leader.pid, sorted(int(leader.stdout.readline()) for _ in range(2))
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()


def test_a_session_has_its_leader_and_all_descendants_but_not_this_process(spinning: tuple[int, list[int]]):
    leader, both = spinning
    assert session_processes(leader) == both
    assert os.getpid() not in session_processes(leader)


def test_cpu_time_grows_while_a_server_spins_and_stands_still_while_it_is_stopped(spinning: tuple[int, list[int]]):
    _, both = spinning
    before, deadline = cpu_seconds(both), time.monotonic() + 20
    while cpu_seconds(both) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cpu_seconds(both) > before
    send_all(both, signal.SIGSTOP)
    until(lambda: [process_runs(pid) for pid in both] == [False, False], 30, "both are stopped")
    stopped = cpu_seconds(both)
    time.sleep(0.3)
    assert cpu_seconds(both) == stopped
    send_all(both, signal.SIGCONT)
    while cpu_seconds(both) <= stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cpu_seconds(both) > stopped


# A server whose child leaves the process group and ignores SIGINT, and so outlives its parent.
LEAKS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: os._exit(0))
if os.fork() == 0:
    os.setsid(); signal.signal(signal.SIGINT, signal.SIG_IGN); print("up", flush=True)
time.sleep(60)
"""


def started(code: str, folder: Path) -> ServerProcess:
    server = ServerProcess([sys.executable, "-c", code], folder)
    if "print" in code:
        while "up" not in server.log.read_text():
            pass
    return server


def test_a_child_that_outlives_the_server_is_found_and_killed(tmp_path: Path):
    server = started(LEAKS, tmp_path)
    try:
        assert server.stop(30)[0] == 0
        assert len(server.left_over()) == 1
    finally:
        server.kill()
    assert server.left_over() == []


def test_a_server_that_does_not_stop_has_no_exit_code(tmp_path: Path):
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    server = started(code, tmp_path)
    try:
        assert server.stop(0.2)[0] is None
    finally:
        server.kill()
    assert server.left_over() == []


def test_the_peak_memory_is_that_of_the_largest_process_and_of_new_files_in_shared_memory(tmp_path):
    new = bytes(8 << 20)
    with PeakMemory([os.getpid(), 1 << 22]) as memory, tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(new)
        file.flush()
        until(lambda: memory.shared >= len(new), 20, "the file is seen")
    assert memory.engine > len(new)


HOLDS_MUCH_FOR_A_MOMENT = (
    "b = bytearray(b'x' * (64 << 20)); del b; print('up', flush=True); import time; time.sleep(60)"
)


def test_the_peak_of_a_process_outlives_the_memory_until_it_is_reset(tmp_path: Path):
    server = started(HOLDS_MUCH_FOR_A_MOMENT, tmp_path)
    try:
        ended = 1 << 22  # a process that does not exist
        assert peak_bytes([server.pid, ended]) > resident_bytes(server.pid) + (60 << 20)
        reset_peak([server.pid, ended])
        assert peak_bytes([server.pid, ended]) < resident_bytes(server.pid) + (8 << 20)
    finally:
        server.kill()
