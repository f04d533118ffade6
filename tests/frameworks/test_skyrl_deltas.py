"""SkyRL's own delta trainer on a real server: see skyrl_deltas_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.fleet_server import server_of
from e2e.server import SMALL
from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("skyrl")
    workers = ("--workers", "2") if kind == "serve" else ()
    with server_of(kind, *SMALL, *workers, "--pull-root", str(folder), "--model-root", str(folder)) as server:
        return run_child("skyrl_deltas_child.py", server.url, MODEL_DIR, folder)


def test_each_delta_serves_what_a_load_of_the_same_weights_serves(run):
    assert run["deltas"] == run["wholes"] and len(run["deltas"]) >= 5
    assert len({checksum for _, checksum, _ in run["deltas"]}) == len(run["deltas"])
    assert len({tuple(tokens) for tokens, _, _ in run["deltas"]}) > 1
    assert [version for _, _, version in run["deltas"]] == [str(n) for n in range(1, len(run["deltas"]) + 1)]


def test_a_spoiled_version_is_refused_and_the_weights_before_it_serve_on(run):
    assert "/fetch_weights" in run["error"] and "tensor" in run["error"] and "version 6" in run["error"]
    assert run["after"] == run["deltas"][-1]


def test_skyrls_other_client_builds_the_spoiled_folder_anew(run):
    reply, same = run["again"]
    assert "'status': 'ok'" in reply and same
