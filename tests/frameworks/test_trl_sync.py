"""A sync of TRL whose weights are lost on their way: what TRL's trainer sees, and what check_sync names. See
trl_sync_child.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.server import perturbed
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import check_sync
from fastdeploy.testing import serve
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--faults")
ROUNDING = 1e-3  # of float32, between the server's order of summation and torch's


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return perturbed(tmp_path / "policy")


def test_after_a_sync_trl_and_the_server_agree(policy):
    with serve(None, *FLAGS) as server:
        seen = run_child("trl_sync_child.py", server.url, policy)
        report = check_sync(server.url, policy, previous=[MODEL_DIR])
    assert seen["version"].endswith("0") and seen["mismatch"] < ROUNDING
    assert report.ok, report.text()


def test_an_update_that_is_lost_on_its_way_is_an_error_in_trl_and_the_old_weights_serve_on(policy):
    """An update that was lost while the version grew: huggingface/trl#5932. Our weight transfer sends the fingerprint
    of each tensor, so the server refuses the update."""
    with serve(None, *FLAGS) as server:
        status, reply = server.call("POST", "/v1/faults", {"fault": "chunk_dropped", "times": 0})
        assert status == 200, reply
        with pytest.raises(AssertionError, match="WeightUpdateRefused: tensor .* has the fingerprint"):
            run_child("trl_sync_child.py", server.url, policy)
        assert check_sync(server.url, MODEL_DIR).ok
        report = check_sync(server.url, policy, previous=[MODEL_DIR])
    assert not report.ok and {one.kind for one in report.differences} == {"stale"}, report.text()
