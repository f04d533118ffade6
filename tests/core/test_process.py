"""The id of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastdeploy.core import process
from fastdeploy.core.process import host_id


@pytest.mark.processes
def test_processes_of_one_machine_share_the_id():
    command = [sys.executable, "-c", "from fastdeploy.core.process import host_id; print(host_id())"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == host_id()


def test_another_boot_and_another_container_have_other_ids(monkeypatch, tmp_path):
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("another\n")
    with monkeypatch.context() as patched:
        patched.setattr(process, "BOOT_ID", other_boot)
        assert host_id.__wrapped__() != host_id()
    monkeypatch.setattr(process, "_namespace", lambda name: "1" if name == "ipc" else "0")
    assert host_id.__wrapped__().endswith("-0-1-0") and host_id.__wrapped__() != host_id()
