"""A server, and the environment of the frameworks' own clients (.venv-frameworks, made by `make test-slow`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet_server import KINDS, server_of
from e2e.server import SMALL, Server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("FRAMEWORKS_PYTHON") or str(ROOT / ".venv-frameworks" / "bin" / "python")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return what the clients talk to: "serve" = one server, or "fleet" = the gateway of two replicas."""
    return request.param


@pytest.fixture(scope="module")
def live(kind: str) -> Iterator[Server]:
    """Return a server for one module, whose clients may change the weights."""
    with server_of(kind, *SMALL) as server:
        yield server


def run_child(name: str, *arguments: Any) -> dict[str, Any]:
    """Run tests/frameworks/NAME in the environment of the frameworks, and return the JSON that it printed."""
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
