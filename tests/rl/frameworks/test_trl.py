"""TRL's weight_transfer: its effects on a server, and (slow) unmodified TRL training with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.fleet_server import FleetServer
from e2e.server import Server
from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer
from rl.embedded_weights import scaled_weights, served_state

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


def test_a_sync_pauses_publishes_under_its_number_and_resumes(server):
    transfer = FastDeployWeightTransfer(server.url)
    transfer.init_weight_transfer()
    first = served_state(server)[2]
    for number, scale in enumerate((1.0, 1.01)):
        transfer.pause()
        assert served_state(server)[0]
        transfer.send_weights(iter(scaled_weights(scale)))
        assert served_state(server)[0], "an update does not resume"
        transfer.resume()
        paused, version, checksum = served_state(server)
        assert (paused, version) == (False, f"trl-{number}")
        assert (checksum == first) == (scale == 1.0)
    transfer.send_weights(iter(scaled_weights(1.0)))
    assert [p.version for p in transfer.publications] == ["trl-0", "trl-1", "trl-2"]
    transfer.destroy()


def test_a_failed_sync_raises_and_the_server_keeps_its_weights(server):
    transfer = FastDeployWeightTransfer(server.url)
    before = served_state(server)
    transfer.pause()
    broken = [(name, array[:1]) for name, array in scaled_weights(1.0)]
    with pytest.raises(WeightUpdateRefused):
        transfer.send_weights(iter(broken))
    assert served_state(server) == before and before[0] is False
    transfer.pause()
    transfer.destroy()
    assert served_state(server) == before, "destroy releases the hold"


def test_without_a_pause_the_weights_are_committed_between_two_steps(server):
    transfer = FastDeployWeightTransfer(server.url, paused=False)
    transfer.pause()
    assert not served_state(server)[0]
    transfer.send_weights(iter(scaled_weights(1.0)))
    transfer.resume()
    assert served_state(server)[:2] == (False, "trl-0")
    transfer.destroy()


@pytest.mark.slow
def test_trl_trains_the_embedded_model_through_this_server(server, tmp_path):
    """Every step's weights arrive bit for bit, and no sample is lost or aborted. `make test-slow` installs TRL."""
    out = tmp_path / "seen.json"
    command = [sys.executable, "-m", "examples.trl_async_grpo", "--url", server.url]
    subprocess.run([*command, "--steps", str(STEPS), "--json", out], cwd=ROOT, check=True, timeout=900)
    seen = json.loads(out.read_text())
    steps = [entry for entry in seen["log"] if "reward" in entry]
    assert len(steps) == STEPS
    published = seen["publications"]
    assert [p["version"] for p in published] == [f"trl-{i}" for i in range(STEPS + 1)], "one at the start, one per step"
    weight_epochs = [p["report"]["weight_epoch"] for p in published]
    assert weight_epochs == list(range(weight_epochs[0], weight_epochs[0] + STEPS + 1))
    serving = server.get("/v1/weights?checksums=true").result
    assert serving["version"] == f"trl-{STEPS}"
    assert serving["checksums"] == seen["sha256"], "the server has the weights of the trainer"
    for name in server.replicas() if isinstance(server, FleetServer) else ():
        assert server.ask(name, "/v1/weights?checksums=true")["checksums"] == seen["sha256"], name
        assert server.ask(name, "/v1/weights")["version"] == f"trl-{STEPS}"
    with Server("--dtype", "float32") as start:
        untrained = start.get("/v1/weights?checksums=true").result["checksums"]
    changed = [name for name, checksum in untrained.items() if checksum != serving["checksums"][name]]
    assert len(changed) == len(untrained), "training changed everything"
    # Samples of the trainer's current weights: its logprobs and the server's differ by rounding only.
    fresh = [entry for entry in steps if entry["sample/staleness_max"] == 0]
    assert fresh and abs(fresh[0]["ratio"] - 1) < 1e-3 and abs(fresh[0]["kl"]) < 1e-4
    assert all(entry.get("rollout/vllm_retry_total", 0) == 0 for entry in steps)
    assert all(entry["completions/min_length"] > 0 for entry in steps if "completions/min_length" in entry)
