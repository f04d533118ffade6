"""SkyRL's FullyAsyncTrainerSim trains on a server, with and without faults: see skyrl_sim_child.py.

Needs SkyRL's repository, as the package on PyPI lacks the examples: ``make test-own-tests CHECKOUTS=/path``.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import check_sync
from fastdeploy.testing import Server, serve
from fastdeploy.testing.models import model_folder
from fastdeploy.testing.tensors import perturbed_copy
from frameworks.conftest import PYTHON, ROOT, run_offline

CHECKOUT = Path(os.environ.get("OWN_TESTS_CHECKOUTS", "")) / "skyrl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("OWN_TESTS_CHECKOUTS") or not CHECKOUT.is_dir(),
        reason="make test-own-tests CHECKOUTS=/path, with SkyRL's repository in skyrl",
    ),
]
STEPS = 4


def train(server: Server, model: Path, work: Path, sync: Path | None = None) -> dict[str, Any]:
    """Run SkyRL's simulated trainer, and return its metrics of each step and the error that ended it."""
    here = ROOT / "tests" / "frameworks"
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "skyrl-gym", here / "served")))
    arguments = [server.url, model, work, STEPS, *([sync] if sync else [])]
    child = run_offline([PYTHON, here / "skyrl_sim_child.py", *arguments], PYTHONPATH=path)
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def arm(server: Server, *rules: dict[str, Any]) -> None:
    status, reply = server.call("POST", "/v1/faults", {"rules": list(rules)})
    assert status == 200, reply


def happened(server: Server) -> dict[str, int]:
    """Return how often each fault happened."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as reply:
        lines = [
            line for line in reply.read().decode().splitlines() if line.startswith("fastdeploy:faults_injected_total{")
        ]
    return {line.split('"')[1]: int(float(line.rpartition(" ")[2])) for line in lines}


@pytest.fixture(scope="module")
def dense() -> Iterator[Server]:
    with serve(None, "--max-num-seqs", "4", "--faults") as server:
        yield server


def test_the_simulated_trainer_trains_to_the_end(dense, tmp_path):
    found = train(dense, MODEL_DIR, tmp_path)
    assert found["error"] is None and found["logged"] is None
    steps = found["steps"]
    assert sorted(map(int, steps)) == list(range(1, STEPS + 1))
    assert all(step["async/staleness_violation_count"] == 0 for step in steps.values())
    assert any(step["reward/avg_raw_reward"] > 0 for step in steps.values())


def test_slow_tokens_and_a_pause_that_hangs_delay_the_trainer_only(dense, tmp_path):
    dense.reset()
    arm(
        dense, {"fault": "slow_tokens", "seconds": 0.05, "times": 6}, {"fault": "pause_hangs", "seconds": 2, "after": 1}
    )
    found = train(dense, MODEL_DIR, tmp_path)
    assert found["error"] is None and len(found["steps"]) == STEPS
    assert max(step["timing/sync_weights"] for step in found["steps"].values()) > 2
    assert happened(dense)["slow_tokens"] == 6 and happened(dense)["pause_hangs"] == 1


def test_a_request_that_is_refused_ends_the_training(dense, tmp_path):
    """SkyRL's client tries again after errors of the connection, and raises errors of the server."""
    dense.reset()
    arm(dense, {"fault": "http_error", "status": 500, "path": "/inference/v1/generate", "after": 9})
    found = train(dense, MODEL_DIR, tmp_path)
    assert found["error"] is not None and len(found["steps"]) < STEPS


def test_stale_experts_are_silent_in_the_trainer_and_named_by_the_check(tmp_path):
    """SkyRL#1680: after the first sync the experts are those of before, and nothing says so."""
    model = model_folder("moe")
    perturbed_copy(model, policy := tmp_path / "policy", 0.1)
    with serve(model, "--max-num-seqs", "4", "--faults") as server:
        arm(server, {"fault": "tensors_stale", "tensors": "*.experts.*", "times": 0})
        found = train(server, model, tmp_path, policy)
        assert found["error"] is None and found["logged"] is None and len(found["steps"]) == STEPS
        report = check_sync(server.url, policy, previous=[model])
        print(report.text())
        assert not report.ok
        assert all(".experts." in one.tensor and one.kind == "stale" for one in report.differences)
        server.call("DELETE", "/v1/faults")
        assert train(server, model, tmp_path, policy)["error"] is None
        assert check_sync(server.url, policy, previous=[model]).ok
