"""TRL's weight_transfer: its effects on a server, and (slow) unmodified TRL training with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.errors import FleetError
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A test leaves it with the weights of the embedded model, under any version."""
    server = Server("--dtype", "float32", "--num-gpu-blocks-override", "2048").wait_ready()
    yield server
    server.stop()
    server.remove()


def weights(scale: float) -> list[tuple[str, np.ndarray]]:
    """Return the embedded model's tensors in float32, times ``scale``."""
    raw = (MODEL_DIR / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            bits = np.frombuffer(raw[8 + size + start : 8 + size + end], "<u2").astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(entry["shape"]) * np.float32(scale)
    return list(tensors.items())


def state(server: Server) -> tuple[bool, str, str]:
    """Return whether the server is paused, the version that serves, and the checksum of the weights."""
    info = server.get("/v1/weights?checksums=true").result
    return server.get("/v1/is_paused").result["is_paused"], info["version"], info["checksum"]


def test_a_sync_pauses_publishes_under_its_number_and_resumes(server):
    transfer = FastDeployWeightTransfer(server.url)
    transfer.init_weight_transfer()
    first = state(server)[2]
    for number, scale in enumerate((1.0, 1.01)):
        transfer.pause()
        assert state(server)[0]
        transfer.send_weights(iter(weights(scale)))
        assert state(server)[0], "an update never resumes"
        transfer.resume()
        paused, version, checksum = state(server)
        assert (paused, version) == (False, f"trl-{number}")
        assert (checksum == first) == (scale == 1.0)
    transfer.send_weights(iter(weights(1.0)))
    assert [p.version for p in transfer.publications] == ["trl-0", "trl-1", "trl-2"]
    transfer.destroy()


def test_a_failed_sync_raises_and_the_server_keeps_its_weights(server):
    transfer = FastDeployWeightTransfer(server.url)
    before = state(server)
    transfer.pause()
    broken = [(name, array[:1]) for name, array in weights(1.0)]
    with pytest.raises(FleetError):
        transfer.send_weights(iter(broken))
    assert state(server) == before and before[0] is False
    transfer.pause()
    transfer.destroy()
    assert state(server) == before, "whoever leaves takes the hold along"


def test_without_a_pause_the_weights_are_committed_between_two_steps(server):
    transfer = FastDeployWeightTransfer(server.url, paused=False)
    transfer.pause()
    assert not state(server)[0]
    transfer.send_weights(iter(weights(1.0)))
    transfer.resume()
    assert state(server)[:2] == (False, "trl-0")
    transfer.destroy()


@pytest.mark.slow
def test_trl_trains_the_embedded_model_through_this_server(server, tmp_path):
    """Every step's weights arrive bit for bit, and no sample is lost or aborted. `make test-slow` installs TRL."""
    out = tmp_path / "seen.json"
    command = [sys.executable, ROOT / "benchmarks" / "trl_async_grpo.py", "--url", server.url]
    subprocess.run([*command, "--steps", str(STEPS), "--json", out], check=True, timeout=900)
    seen = json.loads(out.read_text())
    steps = [entry for entry in seen["log"] if "reward" in entry]
    assert len(steps) == STEPS
    published = seen["publications"]
    assert [p["version"] for p in published] == [f"trl-{i}" for i in range(STEPS + 1)], "one at the start, one a step"
    weight_epochs = [p["reports"][0]["weight_epoch"] for p in published]
    assert weight_epochs == list(range(weight_epochs[0], weight_epochs[0] + STEPS + 1))
    serving = server.get("/v1/weights?checksums=true").result
    assert serving["version"] == f"trl-{STEPS}"
    assert serving["checksums"] == seen["sha256"], "the server has what the trainer has"
    start = Server("--dtype", "float32").wait_ready()
    try:
        untrained = start.get("/v1/weights?checksums=true").result["checksums"]
    finally:
        start.stop()
    changed = [name for name, checksum in untrained.items() if checksum != serving["checksums"][name]]
    assert len(changed) == len(untrained), "training changed everything"
    # Samples of the trainer's current weights: its logprobs and the server's differ by rounding only.
    fresh = [entry for entry in steps if entry["sample/staleness_max"] == 0]
    assert fresh and abs(fresh[0]["ratio"] - 1) < 1e-3 and abs(fresh[0]["kl"]) < 1e-4
    assert all(entry.get("rollout/vllm_retry_total", 0) == 0 for entry in steps)
    assert all(entry["completions/min_length"] > 0 for entry in steps if "completions/min_length" in entry)
