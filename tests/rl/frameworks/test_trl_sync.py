"""TRL's unmodified GRPOTrainer samples from a server, and sends it the weights of every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.server import Server
from fastdeploy.rl.frameworks.trl import FastDeployGeneration
from rl.embedded_weights import scaled_weights, served_state

ROOT = Path(__file__).resolve().parents[3]
STEPS = 3
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


class Accelerator:
    is_main_process = True

    def unwrap_model(self, model: Any) -> Any:
        return model

    def get_state_dict(self, model: Any) -> dict[str, Any]:
        return {**dict(model.named_parameters()), "a name that is tied to another": None}

    def wait_for_everyone(self) -> None: ...


def stand_in(**model: Any) -> Any:
    """Return what the adapter reads of a trainer."""
    args = SimpleNamespace(vllm_structured_outputs_regex=None, generation_kwargs={"seed": 5})
    whole = SimpleNamespace(named_parameters=lambda: scaled_weights(1.01), **model)
    fields = {"model": whole, "model_wrapped": whole, "accelerator": Accelerator(), "args": args}
    return SimpleNamespace(**fields, max_completion_length=4, **SAMPLING)


def test_a_trainer_samples_here_and_the_weights_of_a_step_are_published(server: Server):
    generation = FastDeployGeneration(server.url)
    trainer = generation.attach(stand_in())
    assert trainer.use_vllm and trainer.vllm_generation is generation and trainer._last_loaded_step == -1
    before = served_state(server)[2]
    trainer.vllm_generation.sync_weights()
    paused, version, checksum = served_state(server)
    assert (paused, version) == (False, "trl-0") and checksum != before
    prompts = [[40, 41, 42]] * 3 + [[50, 51]]
    given, ids, logprobs, _ = generation.generate(prompts, None, 3)
    assert given == prompts and all(1 <= len(tokens) <= 4 for tokens in ids)
    assert [len(row) for row in logprobs] == [len(tokens) for tokens in ids] and len(logprobs[0][0]) == 1
    assert len({tuple(tokens) for tokens in ids[:3]}) > 1, "equal prompts get different completions under one seed"
    generation.close()


def test_an_adapter_of_peft_is_refused(server: Server):
    with pytest.raises(ValueError, match="whole model"):
        FastDeployGeneration(server.url).attach(stand_in(merge_adapter=None))


@pytest.mark.slow
def test_trl_trains_the_embedded_model_step_by_step(server: Server):
    command = [sys.executable, ROOT / "tests/rl/frameworks/trl_sync_child.py", server.url, str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stderr[-4000:]
    seen = json.loads(lines[0].removeprefix("RESULT "))
    assert seen["versions"] == [f"trl-{i}" for i in range(STEPS + 1)], "one before each step, and one by the test"
    assert server.get("/v1/weights?checksums=true").result["checksums"] == seen["sha256"]
    steps = [entry for entry in seen["log"] if "reward" in entry]
    assert len(steps) == STEPS
    # The correction compares the server's log probabilities with those of the trainer.
    for entry in steps:
        assert abs(entry["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3
