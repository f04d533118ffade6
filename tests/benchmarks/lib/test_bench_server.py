from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.lib.client import ServerError
from benchmarks.lib.processes import ServerProcess

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


def test_a_server_that_dies_at_start_shows_its_log(tmp_path: Path):
    server = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path)
    with pytest.raises(ServerError, match="no such model"):
        asyncio.run(server.wait_ready(20))
    server.kill()
