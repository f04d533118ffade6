"""``fastdeploy check`` says what would be served, with the figures of the engine's own plan, and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from fastdeploy.core.listener import bind
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.testing.checkpoints import Spec, random_tensors
from fastdeploy.worker.model_runner import ModelRunner
from support.paddle_checkpoints import write_paddle_checkpoint


@pytest.fixture
def check(capsys, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_PORT", "0")

    def run(*args: str, status: int = 0) -> dict[str, Any]:
        assert main(["check", "--json", *args]) == status
        return json.loads(capsys.readouterr().out)

    return run


def test_the_plan_is_that_of_the_engine(check):
    found = check("--max-num-seqs", "3", "--max-model-len", "200", "--dtype", "float32")
    runner = ModelRunner(str(MODEL_DIR), dtype="float32", max_num_seqs=3, max_model_len=200)
    model, memory = found["model"], found["memory"]
    assert runner.weights is not None and runner.cache is not None
    assert memory["kv_blocks"] == runner.info.num_blocks == 3 * 13
    assert memory["kv_cache"] == runner.cache.nbytes
    assert memory["weights"] == pytest.approx(runner.weights.nbytes, rel=0.1), "padding is not counted"
    assert memory["left"] == memory["free"] - memory["weights"] - memory["standby"] - memory["kv_cache"]
    assert (model["max_model_len"], model["dtype"], model["checkpoint_dtype"]) == (200, "float32", "bfloat16")
    assert model["architecture"] == "Qwen3ForCausalLM" and model["chat_template"] and not found["refused"]


@pytest.mark.parametrize("fused", ["", "paddleformers"])
def test_a_folder_in_paddles_layout_is_checked_in_this_layout(check, tmp_path, fused):
    spec = Spec("small", "Ernie4_5ForCausalLM", tied=True, head_dim=16)
    folder = write_paddle_checkpoint(tmp_path / "model", spec, fused=fused)
    model = check(str(folder))["model"]
    assert model["layout"] == (fused or "paddle")
    assert model["checkpoint_bytes"] == sum(array.nbytes for array in random_tensors(spec).values())
    folder = write_paddle_checkpoint(tmp_path / "other", spec, fused=fused, intermediate_size=99)
    [refused] = check(str(folder), status=1)["refused"]
    assert "mlp." in refused["what"] and "in the layout" in refused["why"]


def test_the_speed_follows_from_the_bandwidth(check):
    speed, memory = (check()[key] for key in ("speed", "memory"))
    if speed is None:
        pytest.skip("the ops of this machine cannot measure it")
    token_bytes = memory["kv_cache"] / memory["kv_blocks"] / memory["kv_block_tokens"]
    least = (0.9 * memory["weights"] + token_bytes * speed["context"]) / speed["read"]
    assert 0 < speed["tokens_per_s"]["1"] <= 1 / least
    rates = [speed["tokens_per_s"][n] for n in ("1", "8", "32")]
    assert rates == sorted(rates)


def test_each_setting_has_its_value_and_its_place(check, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTDEPLOY_MAX_NUM_SEQS", "7")
    (tmp_path / "serve.yaml").write_text("block_size: 32\nmax_num_seqs: 5\n")
    settings = {
        one["name"]: one for one in check("--config", str(tmp_path / "serve.yaml"), "--workers", "2")["settings"]
    }
    told = {
        name: (settings[name]["value"], settings[name]["source"]) for name in ("workers", "max_num_seqs", "stall_s")
    }
    assert told == {
        "workers": (2, "--workers"),
        "max_num_seqs": (7, "FASTDEPLOY_MAX_NUM_SEQS"),
        "stall_s": (10, "default"),
    }
    assert settings["block_size"]["source"].endswith("serve.yaml: block_size")
    assert "json" not in settings


def test_a_setting_that_is_refused_is_named_by_its_place(check, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_MAX_MODEL_LEN", "999999")
    found = check(status=1)
    assert found["model"] is None
    [refused] = found["refused"]
    assert refused["what"] == "FASTDEPLOY_MAX_MODEL_LEN" and "expected 1 to 4096" in refused["why"]


def test_a_folder_that_cannot_be_served_is_refused_without_reading_it(check, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    weights = folder / "model.safetensors"
    size = int.from_bytes(weights.read_bytes()[:8], "little")
    header = json.loads(weights.read_bytes()[8 : 8 + size])
    renamed = {name.replace("model.norm.weight", "model.norm.bias_"): entry for name, entry in header.items()}
    text = json.dumps(renamed).encode().ljust(size)
    weights.write_bytes(size.to_bytes(8, "little") + text + weights.read_bytes()[8 + size :])
    [refused] = check(str(folder), status=1)["refused"]
    assert "model.norm.bias_" in refused["why"]
    (folder / "config.json").unlink()
    [refused] = check(str(folder), status=1)["refused"]
    assert refused["what"] == "MODEL" and "config.json" in refused["why"]


def test_a_port_in_use_is_refused_and_a_server_without_a_control_key_gets_a_warning(check):
    with bind("0.0.0.0", 0) as listener:
        port = str(listener.getsockname()[1])
        found = check("--port", port, "--host", "0.0.0.0", status=1)
    assert [one["what"] for one in found["refused"]] == ["--port"] and found["model"]
    assert "control routes are refused" in found["warnings"][0]


def test_a_flag_and_a_variable_without_effect_are_told(check, monkeypatch):
    monkeypatch.setenv("FD_SAMPLING_CLASS", "rejection")
    warnings = "\n".join(check("--swap-space", "4", "--max-model-len", "64")["warnings"])
    assert "--swap-space is taken without effect" in warnings and "FD_SAMPLING_CLASS is taken" in warnings


def test_the_tables_have_the_same(capsys, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_PORT", "0")
    assert main(["check", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "300"]) == 0
    text = capsys.readouterr().out
    for words in ("Qwen3ForCausalLM", "300 blocks of 16 tokens, 4800 tokens in all", "8 streams", "Nothing is refused"):
        assert words in text or (words == "8 streams" and "Speed: not known" in text)
    assert any(
        line.split() == ["num_gpu_blocks_override", "300", "--num-gpu-blocks-override"] for line in text.splitlines()
    )
