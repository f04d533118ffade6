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
# Settings of the clients: nothing is fetched from a model hub, from a list of prices or from a telemetry service.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return what the clients talk to: "serve" = one server, or "fleet" = the gateway of two replicas."""
    return request.param


@pytest.fixture(scope="module")
def live(kind: str) -> Iterator[Server]:
    """Return a server for one module, whose clients may change the weights."""
    with server_of(kind, *SMALL) as server:
        yield server


def model_of(server: Server) -> str:
    """Return the name of the model that the server lists first."""
    return server.get("/v1/models").ok()["data"][0]["id"]


def run_child(name: str, *arguments: Any, python: str = PYTHON, **environment: str) -> dict[str, Any]:
    """Run tests/frameworks/NAME in the environment of the frameworks, and return the JSON that it printed."""
    child = run_offline([python, ROOT / "tests" / "frameworks" / name, *arguments], **environment)
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def run_program(name: str, *arguments: Any, **environment: str) -> None:
    """Run the program NAME that a client installs, and check that it succeeds."""
    child = run_offline([Path(PYTHON).parent / name, *arguments], **environment)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]


def run_offline(command: list[Any], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", **OFFLINE, **environment},
    )
