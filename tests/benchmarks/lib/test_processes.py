from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from benchmarks.lib.processes import (
    PeakMemory,
    cpu_seconds,
    own_bytes,
    peak_bytes,
    reset_peak,
    resident_bytes,
    send_all,
)
from e2e.server import until
from fastdeploy.engine.requests.delivery import process_runs
from fastdeploy.testing import ServerProcess

SPINS = "import os\nos.fork()\nwhile True: pass"


@pytest.fixture
def spinning() -> Iterator[list[int]]:
    """Start two processes that use CPU."""
    with ServerProcess([sys.executable, "-c", SPINS]) as server:
        yield until(lambda: len(pids := server.processes()) == 2 and pids, 20, "two processes")
        server.kill()


def test_cpu_time_grows_while_a_server_spins_and_stands_still_while_it_is_stopped(spinning: list[int]):
    both = spinning
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


def test_memory_that_a_forked_process_shares_is_not_its_own(spinning: list[int]):
    assert all(0 < own_bytes(pid) < resident_bytes(pid) for pid in spinning)
    assert own_bytes(2**22 + 1) == 0 and cpu_seconds([2**22 + 1]) == 0.0, "no process has such a number"


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


def test_the_peak_of_a_process_outlives_the_memory_until_it_is_reset():
    with ServerProcess([sys.executable, "-c", HOLDS_MUCH_FOR_A_MOMENT]) as server:
        until(lambda: "up" in server.log(), 20, "the memory is given back")
        ended = 1 << 22  # a process that does not exist
        assert peak_bytes([server.pid, ended]) > resident_bytes(server.pid) + (60 << 20)
        reset_peak([server.pid, ended])
        assert peak_bytes([server.pid, ended]) < resident_bytes(server.pid) + (8 << 20)
