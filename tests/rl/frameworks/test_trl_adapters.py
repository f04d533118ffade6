"""Unmodified TRL trains an adapter with PEFT through this server, without any class of this project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.embedded import MODEL_DIR
from rl.frameworks.recording_proxy import Recording, recording_proxy
from support.torch_adapters import adapted_text_logprobs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
STEPS = 4
STALENESS = 1
POLICIES = [f"trl-policy-v{k}" for k in range(1, STEPS + 2)]  # one at the start, one per step
TRAINED = ["--lora-rank", "8", "--learning-rate", "2e-3", "--max-staleness", str(STALENESS), "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def seen(server, tmp_path_factory) -> Recording:
    """Everything that TRL sent to the server, and the answers."""
    with recording_proxy(server.url, tmp_path_factory.mktemp("policies")) as recording:
        command = [sys.executable, "-m", "examples.trl_async_grpo", "--url", recording.url, *TRAINED]
        subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    return recording


def spans_of(reply: dict) -> list[tuple[str | None, int]]:
    return [(span.get("lora_name"), span.get("adapter_epoch")) for span in reply["choices"][0]["weight_versions"]]


def test_each_policy_is_loaded_under_a_new_name_in_a_pause_and_old_ones_are_unloaded(server, seen):
    calls = [(path, given.get("lora_name")) for path, given in seen.calls if path != "/server_info"]
    expected = []
    for k, name in enumerate(POLICIES):
        expected += [("/pause", None), ("/v1/load_lora_adapter", name), ("/resume", None)]
        expected += [("/v1/unload_lora_adapter", POLICIES[k - 2])] if k >= 2 else []
    assert calls == expected
    assert all(given == {"mode": "keep"} for path, given in seen.calls if path == "/pause")
    known = [adapter["lora_name"] for adapter in server.get("/v1/adapters").result["adapters"]]
    assert known == POLICIES[-2:]


def test_every_sample_was_computed_by_the_policy_that_its_request_named(seen):
    sampled = {body["model"] for body, _ in seen.completions}
    assert sampled <= set(POLICIES)
    for step in range(STEPS):  # at most so stale: which of these policies it is depends on the machine's speed
        assert sampled & set(POLICIES[max(step - STALENESS, 0) : step + 1])
    loads: dict[str, int] = {}  # adapter_epoch by name: each policy was loaded once
    for body, reply in seen.completions:
        [(name, adapter_epoch)] = spans_of(reply)
        assert (name, adapter_epoch) == (body["model"], loads.setdefault(name, adapter_epoch))
        choice = reply["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0


def test_the_logprobs_of_samples_are_those_of_peft_with_the_adapter_that_trl_saved(seen, torch_process):
    moved = 0.0
    for name in sorted({body["model"] for body, _ in seen.completions}):
        samples = [(body, reply["choices"][0]) for body, reply in seen.completions if body["model"] == name][:8]
        texts = [body["prompt"] + choice["token_ids"] for body, choice in samples]
        of_policy = torch_process.compute(adapted_text_logprobs, MODEL_DIR, seen.adapters[name], texts)
        of_base = torch_process.compute(adapted_text_logprobs, MODEL_DIR, MODEL_DIR, texts)
        for (_, choice), policy, base in zip(samples, of_policy, of_base, strict=True):
            served = np.array(choice["logprobs"]["token_logprobs"])
            np.testing.assert_allclose(served, policy[-len(served) :], atol=1e-3)
            moved = max(moved, np.abs(policy - base).max())
    assert moved > 0.1, "training moved the adapters away from the base model"
