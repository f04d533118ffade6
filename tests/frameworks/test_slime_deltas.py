"""slime's own delta trainer on a real server: see slime_child.py. slime is on no package index: `make test-slime` takes
it from its repository."""

from __future__ import annotations

import os
from typing import Any

import pytest

from e2e.fleet_server import server_of
from e2e.server import SMALL
from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import ROOT, run_child

SLIME = os.environ.get("SLIME") or str(ROOT / ".venv-frameworks" / "slime")
pytestmark = [pytest.mark.slow, pytest.mark.slime]


@pytest.fixture(scope="module")
def runs(kind: str, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("slime")
    workers = ("--workers", "2") if kind == "serve" else ()
    with server_of(kind, *SMALL, *workers, "--pull-root", str(folder), "--model-root", str(folder)) as server:
        return run_child("slime_child.py", SLIME, server.url, MODEL_DIR, folder)


def test_each_delta_serves_what_a_load_of_the_same_weights_serves(runs):
    assert len({tuple(run["run"]) for run in runs}) == len(runs) == 4
    for run in runs:
        assert run["deltas"] == run["wholes"] and len(run["deltas"]) >= 5
        assert len({checksum for _, checksum, _ in run["deltas"]}) == len(run["deltas"])
        assert [version for _, _, version in run["deltas"]] == [str(n) for n in range(1, len(run["deltas"]) + 1)]
    assert len({tuple(tokens) for run in runs for tokens, _, _ in run["deltas"]}) > len(runs)


def test_a_spoiled_version_is_refused_and_the_weights_before_it_serve_on(runs):
    for run in runs:
        assert "tensor" in run["error"] and "version 6" in run["error"]
        assert run["after"] == run["deltas"][-1]
