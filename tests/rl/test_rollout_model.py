"""``RolloutModel``: FastDeploy's names and layout, what a trainer writes into them, and what a server then serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.serving_dtype import widen
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.entrypoints.llm import LLM
from fastdeploy.model_executor.safetensors_source import open_source
from fastdeploy.rl.rollout_config import RolloutModelConfig
from fastdeploy.rl.rollout_model import RolloutModel

# Of one layer of FastDeploy's Qwen3: tests/e2e/Qwen3VL_RL/baseline.txt, release 2.6, without the image encoder.
QWEN3_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "mlp.up_gate_proj.weight": "mlp.gate_up_fused_proj.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "self_attn.qk_norm.k_norm.weight": "self_attn.qk_norm.k_norm.weight",
    "self_attn.qk_norm.q_norm.weight": "self_attn.qk_norm.q_norm.weight",
    "self_attn.qkv_proj.weight": "self_attn.qkv_proj.weight",
}
ENDS = {
    "lm_head.linear.weight": "lm_head.weight",
    "model.embed_tokens.embeddings.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
}
NAMES = ["qwen3", "qwen2_tied", "ernie_bias", "ernie_moe", "glm_moe"]
# Of one layer of FastDeploy's ERNIE 4.5 with experts, beside its attention: fastdeploy/rl/rollout_model.py, develop.
EXPERTS = ["mlp.experts.{}.up_gate_proj.weight", "mlp.experts.{}.down_proj.weight"]
ERNIE_LAYER = {
    "mlp.gate.weight": ("mlp.gate.weight", [64, 6]),
    "mlp.experts.gate_correction_bias": ("mlp.moe_statics.e_score_correction_bias", [1, 6]),
    "mlp.experts.up_gate_proj_weight": ([EXPERTS[0].format(i) for i in range(6)], [6, 64, 2 * 32]),
    "mlp.experts.down_proj_weight": ([EXPERTS[1].format(i) for i in range(6)], [6, 32, 64]),
    "mlp.shared_experts.up_gate_proj.weight": ("mlp.shared_experts.up_gate_proj.weight", [64, 2 * 64]),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.down_proj.weight", [64, 64]),
}


def model_of(folder: Path, **settings) -> RolloutModel:
    return RolloutModel(RolloutModelConfig(str(folder), dtype="float32", max_model_len=256, **settings))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with open_source(FolderSource(str(folder))) as reader:
        return {name: widen(reader.read(name)) for name in reader.entries}


def layers_of(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]


def values(tensors) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], name)


def test_names_and_mappings_are_fastdeploys(checkpoints):
    model, layers = model_of(checkpoints["qwen3"]), layers_of(checkpoints["qwen3"])
    of_layers = {
        f"model.layers.{i}.{a}": f"model.layers.{i}.{b}" for i in range(layers) for a, b in QWEN3_LAYER.items()
    }
    assert model.get_name_mappings_to_training(trainer_degree=None) == of_layers | ENDS
    assert model.state_dict().keys() == of_layers.keys() | ENDS.keys()
    assert model.get_quantization_infer_keys() == []
    qwen2 = model_of(checkpoints["qwen2"]).get_name_mappings_to_training()
    assert qwen2["qwen2.layers.0.self_attn.qkv_proj.bias"] == "qwen2.layers.0.self_attn.qkv_proj.bias"
    assert qwen2["qwen2.embed_tokens.embeddings.weight"] == "qwen2.embed_tokens.weight"


def test_experts_are_stacked_under_fastdeploys_names_and_each_has_a_name_in_the_trainer(checkpoints):
    model, prefix = model_of(checkpoints["ernie_moe"], dynamic_load_weight=False), "ernie.layers.1."
    mappings, state = model.get_name_mappings_to_training(), model.state_dict()
    names = {name.removeprefix(prefix) for name in state if name.startswith(prefix + "mlp.")}
    assert names == ERNIE_LAYER.keys() and mappings.keys() == state.keys()
    for name, (trained, shape) in ERNIE_LAYER.items():
        wanted = prefix + trained if isinstance(trained, str) else [prefix + one for one in trained]
        assert mappings[prefix + name] == wanted and state[prefix + name].shape == shape
    assert mappings["ernie.layers.0.mlp.up_gate_proj.weight"] == "ernie.layers.0.mlp.up_gate_proj.weight"
    experts = np.asarray(state[prefix + "mlp.experts.up_gate_proj_weight"].numpy())
    up = tensors_of(checkpoints["ernie_moe"])["model.layers.1.mlp.experts.4.up_proj.weight"]
    np.testing.assert_array_equal(experts[4, :, 32:], up.T)
    assert state[prefix + "mlp.gate.weight"].dtype == paddle.float32


@pytest.mark.parametrize("name", NAMES)
def test_linears_are_fused_and_in_out_and_a_checkpoint_comes_back_bit_for_bit(checkpoints, name):
    model, expected = model_of(checkpoints[name], dynamic_load_weight=False), tensors_of(checkpoints[name])
    state = {key.partition(".")[2]: value for key, value in values(model.state_dict()).items()}
    of_layer = "model.layers.0."
    qkv = [expected[f"{of_layer}self_attn.{part}_proj.weight"].T for part in "qkv"]
    np.testing.assert_array_equal(state["layers.0.self_attn.qkv_proj.weight"], np.concatenate(qkv, axis=1))
    gate_up = [expected[f"{of_layer}mlp.{part}_proj.weight"].T for part in ("gate", "up")]
    np.testing.assert_array_equal(state["layers.0.mlp.up_gate_proj.weight"], np.concatenate(gate_up, axis=1))
    head = expected.get("lm_head.weight", expected["model.embed_tokens.weight"])
    np.testing.assert_array_equal(state["linear.weight"], head.T)
    assert_same(values(model.checkpoint()), expected | {"lm_head.weight": head})


def of_paddle(folder: Path, target: Path) -> Path:
    """Write the config.json of ``folder`` as Paddle's checkpoints have it, which says that weights are [in, out]."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "transformers_version")}
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32", "source": "paddle"}))
    return target


def test_what_a_trainer_wrote_in_place_is_served_with_its_version(checkpoints, tmp_path):
    folder, step, snapshot = checkpoints["qwen3"], tmp_path / "step", of_paddle(checkpoints["qwen3"], tmp_path / "own")
    model, state = model_of(snapshot), model_of(folder, dynamic_load_weight=False).state_dict()
    with pytest.raises(InvalidField, match="was not written"):
        model.checkpoint()
    with paddle.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.set_value(state[name] * 1.5)
    model.save_checkpoint(step)
    assert not {"dtype", "source"} & json.loads((step / "config.json").read_text()).keys()
    assert all(tensor.is_contiguous() for tensor in state.values()), "paddle.save would write another order"
    expected = {name: array * np.float32(1.5) for name, array in tensors_of(folder).items()}
    assert_same(tensors_of(step), expected)
    paddle.save(model.state_dict(), str(snapshot / "model_state.tp0.0.pdparams"))  # as FastDeploy's trainers do
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, max_model_len=128) as llm:
        found = []
        for version, path in (("0", None), ("step-1", step), ("old", folder), ("snapshot-1", snapshot)):
            if path is not None:
                llm.update_weights(str(path), version=version)
            found.append(llm.weights(checksums=True))
    assert [one["version"] for one in found] == ["0", "step-1", "old", "snapshot-1"]
    old, new, again, of_snapshot = (one["checksums"] for one in found)
    assert old == again and new == of_snapshot and all(old[name] != new[name] for name in old)


@pytest.mark.parametrize("name", NAMES)
def test_weights_load_from_checkpoint_paddle_and_own_names_in_any_order(checkpoints, name):
    expected = tensors_of(checkpoints[name])
    model = model_of(checkpoints[name])
    kept = ("embed", "head", "correction_bias")
    linears = {key for key in expected if expected[key].ndim == 2 and not any(one in key for one in kept)}
    in_out = {key: np.ascontiguousarray(value.T) if key in linears else value for key, value in expected.items()}
    for given in (expected, in_out, dict(reversed(in_out.items()))):
        model.load_weights(iter(given.items()))
        found = values(model.checkpoint())
        assert_same({key: found[key] for key in expected}, expected)
    own = values(model.state_dict())
    again = model_of(checkpoints[name])
    again.load_weights((key, paddle.to_tensor(value)) for key, value in own.items())
    assert_same(values(again.state_dict()), own)


def test_a_load_that_is_not_whole_names_the_tensor_and_changes_nothing(checkpoints):
    model, good = model_of(checkpoints["qwen3"], dynamic_load_weight=False), tensors_of(checkpoints["qwen3"])
    before = values(model.state_dict())
    down = "model.layers.0.mlp.down_proj.weight"
    up = "model.layers.1.mlp.up_proj.weight"
    bad = {
        down: {key: value for key, value in good.items() if key != down},
        "model.unknown.weight": good | {"model.unknown.weight": good[down]},
        "model.norm.weight": good | {"model.norm.weight": good[down]},
        up: good | {up: np.ascontiguousarray(good[up].T)},
    }
    for name, tensors in bad.items():
        with pytest.raises(InvalidField) as info:
            model.load_weights(tensors.items())
        assert info.value.field == name
    assert_same(values(model.state_dict()), before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensor_parallel_size", 4), ("load_strategy", "ipc"), ("dtype", "float16"), ("speculative_method", "mtp")],
)
def test_settings_that_cannot_be_given_are_refused_by_name(field, value):
    with pytest.raises(InvalidField, match=f"^{field}"):
        RolloutModelConfig("folder", **{field: value})
    assert f"{field}: " in str(RolloutModelConfig("folder", quantization="wint8"))


def test_the_settings_can_be_imported_without_paddle():
    code = "import sys, fastdeploy.rl.rollout_config; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
