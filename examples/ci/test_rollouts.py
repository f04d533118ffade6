"""Tests of a trainer, against a real engine with real weights, which also dies and lies on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np

from fastdeploy.rl.check_sync import check_sync
from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.testing import Server
from fastdeploy.testing.models import model_folder
from fastdeploy.testing.tensors import float32_tensors, perturbed_copy

PROMPT = [49, 43, 49, 61]  # "1+1=": a token is a byte
MODEL = model_folder("qwen3")


def arm(server: Server, **rule: object) -> None:
    httpx.post(f"{server.url}/v1/faults", json=rule).raise_for_status()


def test_a_chat(fastdeploy_server: Server) -> None:
    question = {"messages": [{"role": "user", "content": "12+34="}], "max_tokens": 64, "temperature": 0}
    reply = httpx.post(f"{fastdeploy_server.url}/v1/chat/completions", json=question).json()
    assert "46" in reply["choices"][0]["message"]["content"]


def test_each_token_names_the_weights_that_made_it(fastdeploy_server: Server) -> None:
    weights = {name: array * np.float32(1.25) for name, array in float32_tensors(MODEL).items()}
    with SyncRolloutClient(fastdeploy_server.url) as client:
        assert client.generate(PROMPT, {"max_tokens": 8}).max_version == "0"
        client.publish(weights, version="step-1")
        [span] = client.generate(PROMPT, {"max_tokens": 8}).spans
    assert (span.version, span.start) == ("step-1", 0)


def test_a_rollout_outlives_the_engine(fastdeploy_serve: Callable[..., Server]) -> None:
    server = fastdeploy_serve("llama", "--faults")
    arm(server, fault="death", of="engine", tokens=3)
    with SyncRolloutClient(server.url) as client:
        rollout = client.generate(PROMPT, {"max_tokens": 16, "ignore_eos": True})
    assert len(rollout.token_ids) == 16 and rollout.num_resumes == 1


def test_a_wrong_sync_is_found(fastdeploy_server: Server, tmp_path: Path) -> None:
    perturbed_copy(MODEL, tmp_path / "step-1", scale=0.1)
    arm(fastdeploy_server, fault="tensors_stale", tensors="model.layers.2.mlp.*")
    update = {"model_path": str(tmp_path / "step-1"), "version": "step-1"}
    httpx.post(f"{fastdeploy_server.url}/v1/update_weights", json=update).raise_for_status()
    report = check_sync(fastdeploy_server.url, tmp_path / "step-1")
    assert not report.ok and report.differences[0].tensor.startswith("model.layers.2.mlp."), report.text()
