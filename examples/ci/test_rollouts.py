"""Tests of a trainer, against a real engine with real weights, which also dies and lies on request."""

from __future__ import annotations

import httpx
import numpy as np
from fastdeploy.rl.check_sync import check_sync

from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.testing.models import model_folder
from fastdeploy.testing.tensors import float32_tensors

PROMPT = [49, 43, 49, 61]  # "1+1=": a token is a byte
MODEL = model_folder("qwen3")


def next_weights() -> dict[str, np.ndarray]:
    return {name: array * np.float32(1.25) for name, array in float32_tensors(MODEL).items()}


def arm(server, **rule) -> None:
    httpx.post(f"{server.url}/v1/faults", json=rule).raise_for_status()


def test_a_chat(fastdeploy_server):
    question = {"messages": [{"role": "user", "content": "12+34="}], "max_tokens": 64, "temperature": 0}
    reply = httpx.post(f"{fastdeploy_server.url}/v1/chat/completions", json=question).json()
    assert "46" in reply["choices"][0]["message"]["content"]


def test_each_token_names_the_weights_that_made_it(fastdeploy_server):
    with SyncRolloutClient(fastdeploy_server.url) as client:
        assert client.generate(PROMPT, {"max_tokens": 8}).max_version == "0"
        client.publish(next_weights(), version="step-1")
        [span] = client.generate(PROMPT, {"max_tokens": 8}).spans
    assert (span.version, span.start) == ("step-1", 0)


def test_a_rollout_outlives_the_engine(fastdeploy_server):
    arm(fastdeploy_server, fault="death", of="engine", tokens=3)
    with SyncRolloutClient(fastdeploy_server.url) as client:
        rollout = client.generate(PROMPT, {"max_tokens": 16, "ignore_eos": True})
    assert len(rollout.token_ids) == 16 and rollout.num_resumes == 1


def test_a_wrong_sync_is_found(fastdeploy_server):
    arm(fastdeploy_server, fault="tensors_stale", tensors="model.layers.2.mlp.*")
    with SyncRolloutClient(fastdeploy_server.url) as client:
        client.publish(next_weights(), version="step-1")
    report = check_sync(fastdeploy_server.url, next_weights(), model=MODEL)
    assert not report.ok and report.differences[0].name.startswith("model.layers.2.mlp."), report.text()
