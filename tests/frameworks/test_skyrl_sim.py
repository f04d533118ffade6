"""SkyRL's FullyAsyncTrainerSim trains on a server, with and without faults: see skyrl_sim_child.py.

Needs SkyRL's repository, as the package on PyPI lacks the examples: ``make test-own-tests CHECKOUTS=/path``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import SyncReport, check_sync
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


HERE = ROOT / "tests" / "frameworks"


class Results(NamedTuple):
    """Of all trainings, which run in one process. happened: how often each fault did."""

    trained: dict[str, dict[str, Any]]
    happened: dict[str, int]
    stale: SyncReport
    equal: SyncReport


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    work, model = tmp_path_factory.mktemp("skyrl"), model_folder("moe")
    perturbed_copy(model, policy := work / "policy", 0.1)
    slow = [{"fault": "slow_tokens", "seconds": 0.05, "times": 6}, {"fault": "pause_hangs", "seconds": 2, "after": 1}]
    stale = [{"fault": "tensors_stale", "tensors": "*.experts.*", "times": 0}]
    flags = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "512", "--faults")
    with serve(None, *flags) as dense, serve(model, *flags) as broken, serve(model, *flags) as sound:
        runs = {
            "plain": run_of(dense, MODEL_DIR),
            "slow": run_of(dense, MODEL_DIR, rules=slow),
            "stale": run_of(broken, model, policy, stale),
            "sound": run_of(sound, model, policy),
        }
        path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "skyrl-gym", HERE / "served")))
        arguments = [work, json.dumps(list(runs.values()))]
        child = run_offline([PYTHON, HERE / "skyrl_sim_child.py", *arguments], PYTHONPATH=path)
        lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, child.stdout[-2000:] + child.stderr[-4000:]
        trained = dict(zip(runs, json.loads(lines[0].removeprefix("RESULT ")), strict=True))
        return Results(
            trained,
            happened(dense),
            check_sync(broken.url, policy, previous=[model]),
            check_sync(sound.url, policy, previous=[model]),
        )


def run_of(server: Server, model: Path, sync: Path | str = "", rules: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return one training, as skyrl_sim_child.py reads it."""
    return {"url": server.url, "model": str(model), "sync": str(sync), "rules": list(rules)}


def happened(server: Server) -> dict[str, int]:
    """Return how often each fault happened."""
    status, reply = server.call("GET", "/v1/faults")
    assert status == 200, reply
    counts: dict[str, int] = reply["result"]["counts"] if "result" in reply else reply["counts"]
    return counts


def test_the_simulated_trainer_trains_to_the_end(results):
    found = results.trained["plain"]
    assert found["error"] is None and found["logged"] is None
    assert sorted(map(int, found["steps"])) == list(range(1, STEPS + 1))
    assert all(step["async/staleness_violation_count"] == 0 for step in found["steps"].values())
    assert any(step["reward/avg_raw_reward"] > 0 for step in found["steps"].values())


def test_slow_tokens_and_a_pause_that_hangs_only_delay_the_trainer(results):
    found = results.trained["slow"]
    assert found["error"] is None and len(found["steps"]) == STEPS
    assert max(step["timing/sync_weights"] for step in found["steps"].values()) > 2
    assert results.happened["slow_tokens"] == 6 and results.happened["pause_hangs"] == 1


def test_stale_experts_are_silent_in_the_trainer_and_named_by_the_check(results):
    """SkyRL#1680: after the first sync the experts are those of before, and nothing says so."""
    seen = results.trained["stale"]
    assert seen["error"] is None and seen["logged"] is None and len(seen["steps"]) == STEPS
    print(results.stale.text())
    assert not results.stale.ok and results.stale.differences
    assert all(".experts." in one.tensor and one.kind == "stale" for one in results.stale.differences)
    assert results.trained["sound"]["error"] is None
    assert results.equal.ok, results.equal.text()
