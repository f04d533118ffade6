"""Servers and the environment of the frameworks' own clients, which `make test-slow` sets up in .venv-frameworks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("FRAMEWORKS_PYTHON") or str(ROOT / ".venv-frameworks" / "bin" / "python")


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    """A server of the module's own, with the embedded model. The clients of the module change its weights."""
    server = Server("--max-num-seqs", "4", "--num-gpu-blocks-override", "2048").wait_ready()
    yield server
    server.kill_everything()
    shutil.rmtree(server.ipc_root, ignore_errors=True)
    server.log_path.unlink(missing_ok=True)


def run_child(name: str, *arguments: Any) -> dict[str, Any]:
    """Run tests/frameworks/NAME in the environment of the frameworks; what it printed after RESULT."""
    child = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "frameworks" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def child() -> Callable[..., dict[str, Any]]:
    return run_child
