"""Whether a process runs, asked of real ones."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from fastdeploy.engine.requests.delivery import process_runs


@pytest.mark.processes
def test_a_process_that_lives_runs_and_one_that_is_stopped_or_dead_does_not():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert process_runs(process.pid) and process_runs(os.getpid())
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert not process_runs(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert process_runs(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process_runs(process.pid), "a zombie"
    finally:
        process.kill()
        process.wait()
    assert not process_runs(process.pid)
