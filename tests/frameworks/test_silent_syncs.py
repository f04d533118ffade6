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
from frameworks.conftest import PYTHON, ROOT, run_child

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


def checkout(name: str) -> Path:
    """Return the checkout of a framework, or skip the test."""
    if not Path(CHECKOUTS, name).is_dir():
        pytest.skip(f"{CHECKOUTS}/{name} is missing")
    return Path(CHECKOUTS, name)


def python_of(name: str) -> str:
    return os.environ.get(f"OWN_TESTS_PYTHON_{name}", PYTHON)


def arm(server: Server, **rule: Any) -> None:
    status, reply = server.call("POST", "/v1/faults", rule)
    assert status == 200, reply


def synced(by: tuple[str, str], server: Server, folder: Path) -> dict[str, Any]:
    """Return the trainer's view of a sync."""
    name, folder_name = by
    arguments = (name, checkout(folder_name), server.url, folder, "step-1")
    return run_child("sync_child.py", *arguments, python=python_of(name))


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


def test_an_update_that_one_of_two_engines_lost_is_unseen_by_areal_and_named_by_the_check(clean, new_weights):
    """vllm#52689 and vllm#51350 propose checksums in vLLM for such updates. AReaL's vLLM backend sends to both."""
    with serve(None, "--faults", "--max-num-seqs", "4", "--num-gpu-blocks-override", "2048") as other:
        arm(other, fault="chunk_dropped")
        view = run_child(
            "areal_sync_child.py", checkout("areal"), new_weights, clean.url, other.url, python=python_of("areal")
        )
        assert view == {"error": "", "version": 1}
        assert check_sync(clean.url, new_weights, previous=[MODEL_DIR]).ok
        report = check_sync(other.url, new_weights, previous=[MODEL_DIR])
    assert not report.ok and {one.kind for one in report.differences} == {"stale"}, report.text()
    assert len(report.differences) == report.tensors


def test_a_tensor_that_was_not_loaded_is_an_error_in_verl_and_the_old_weights_serve_on(clean, new_weights):
    """verl#6666 compares what vLLM has loaded with what the trainer sent, once. Our checkpoint engine sends the
    fingerprint of each tensor with each update, so the server refuses the update. verl leaves the server paused after
    a failed update, so there are no answers to check."""
    tensor = "model.embed_tokens.weight"
    arm(clean, fault="tensors_stale", tensors=tensor, times=0)
    paths = (ROOT, ROOT / "tests/rl/frameworks", ROOT / "tests/frameworks", checkout("verl"))
    view = run_child(
        "verl_sync_child.py", MODEL_DIR, new_weights, clean.url,
        python=python_of("verl"), PYTHONPATH=os.pathsep.join(map(str, paths)),
    )  # fmt: skip
    assert "WeightUpdateRefused" in view["error"] and tensor in view["error"]
    assert check_sync(clean.url, MODEL_DIR, answers=False).ok
    report = check_sync(clean.url, new_weights, previous=[MODEL_DIR], answers=False)
    assert not report.ok and {one.kind for one in report.differences} == {"stale"}, report.text()
