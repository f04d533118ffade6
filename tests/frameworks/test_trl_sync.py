"""A sync of TRL whose weights are lost on their way: what TRL's trainer sees, and what check_sync names. See
trl_sync_child.py."""

from __future__ import annotations

import pytest

from e2e.server import perturbed
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import check_sync
from fastdeploy.testing import serve
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow
ROUNDING = 1e-3  # of float32, between the server's order of summation and torch's


@pytest.mark.parametrize("fault", [None, "chunk_dropped"])
def test_a_sync_that_changes_nothing_is_only_a_mismatch_to_trl_and_named_by_the_check(fault, tmp_path):
    """TRL's trainer counts a new version, no call fails, and the loss is computed from log probabilities of other
    weights. A sync in which an update was lost while the version grew: huggingface/trl#5932."""
    policy = perturbed(tmp_path / "policy")
    with serve(None, "--dtype", "float32", "--max-num-seqs", "4", "--faults") as server:
        if fault:
            status, reply = server.call("POST", "/v1/faults", {"fault": fault, "times": 0})
            assert status == 200, reply
        seen = run_child("trl_sync_child.py", server.url, policy)
        report = check_sync(server.url, policy, previous=[MODEL_DIR])
    print(seen, report.text(), sep="\n")
    assert seen["version"].endswith("0")
    assert report.ok == (fault is None) == (seen["mismatch"] < ROUNDING)
    assert {one.kind for one in report.differences} == ({"stale"} if fault else set())
