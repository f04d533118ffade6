"""Syncs that go wrong in silence: a fault, the trainer's view by the framework's own code, and the check that names it.

The frameworks are read from checkouts: ``make test-own-tests CHECKOUTS=/path``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import perturbed
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import Verdict, check_sync
from fastdeploy.testing import Server, serve
from frameworks.conftest import run_child

CHECKOUTS = os.environ.get("OWN_TESTS_CHECKOUTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUTS, reason="make test-own-tests CHECKOUTS=/path/to/their/repositories"),
]
SLIME, NEMO_RL = ("slime", "slime"), ("nemo_rl", "nemo-rl")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(None, "--faults", "--max-num-seqs", "4", "--num-gpu-blocks-override", "2048") as served:
        yield served


@pytest.fixture
def clean(server: Server) -> Server:
    server.reset()
    return server


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(tmp_path_factory.mktemp("weights") / "new")


def arm(server: Server, **rule: Any) -> None:
    status, reply = server.call("POST", "/v1/faults", rule)
    assert status == 200, reply


def synced(by: tuple[str, str], server: Server, folder: Path) -> dict[str, Any]:
    """Return the trainer's view of a sync."""
    name, checkout = by
    if not Path(CHECKOUTS, checkout).is_dir():
        pytest.skip(f"{CHECKOUTS}/{checkout} is missing")
    return run_child("sync_child.py", name, Path(CHECKOUTS, checkout), server.url, folder, "step-1")


GOOD = {
    SLIME: {"success": True, "version": "step-1", "checked": True},
    NEMO_RL: {"error": "", "is_stale": False, "healthy": True},
}


@pytest.mark.parametrize("by", GOOD, ids=lambda by: by[1])
def test_a_good_sync_passes_the_check(clean, new_weights, by):
    assert check_sync(clean.url, MODEL_DIR).ok  # its prompts are in the prefix cache now
    assert synced(by, clean, new_weights) == GOOD[by]
    report = check_sync(clean.url, new_weights, previous=[MODEL_DIR])
    assert report.ok and report.kv is not Verdict.DIFFERS, report.text()


def test_flipped_bits_are_unseen_by_slime_and_named_by_the_check(clean, new_weights):
    """SGLang added checksums of all tensors for such transfers (sglang#17009). slime asks for them, but it has nothing
    to compare them with, and compares the labels of the weights only."""
    tensor = "model.layers.0.mlp.down_proj.weight"
    arm(clean, fault="bits_flipped", call="update", tensors=tensor, bits=64, seed=1)
    assert synced(SLIME, clean, new_weights) == GOOD[SLIME]
    report = check_sync(clean.url, new_weights, previous=[MODEL_DIR])
    assert not report.ok
    assert [one.tensor for one in report.differences] == [tensor], report.text()
    assert 1 <= report.differences[0].changed <= 64


def test_a_failed_sync_that_advanced_a_part_is_told_as_an_error_and_named_by_the_check(clean, new_weights):
    """NeMo-RL#2444. NeMo-RL sees an error, and takes the weights that serve for the old ones."""
    arm(clean, fault="sync_fails_half_way")
    view = synced(NEMO_RL, clean, new_weights)
    assert "500" in view["error"] and view["is_stale"] and view["healthy"]
    report = check_sync(clean.url, MODEL_DIR)
    assert not report.ok, "these are not the old weights"
    report = check_sync(clean.url, new_weights, previous=[MODEL_DIR])
    assert not report.ok, "nor are they the new ones"
    stale = {one.tensor for one in report.differences if one.kind == "stale"}
    assert stale and stale == {one.tensor for one in report.differences}, report.text()
    assert len(stale) < report.tensors


def test_kv_older_than_the_weights_is_unseen_by_nemo_rl_and_named_by_the_check(clean, new_weights):
    """NeMo-RL#4018. The caller clears the cache and brings the weights; neither makes the engine forget its KV."""
    assert check_sync(clean.url, MODEL_DIR).ok  # its prompts are in the prefix cache now
    arm(clean, fault="kv_kept", times=2)
    assert synced(NEMO_RL, clean, new_weights) == GOOD[NEMO_RL]
    report = check_sync(clean.url, new_weights, previous=[MODEL_DIR])
    assert not report.ok and not report.differences, report.text()
    assert report.kv is Verdict.DIFFERS, report.text()
