"""A trainer's weights have the fingerprints that a server has, whatever form they come in."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.rl.check_sync import weights as trainer_weights
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.worker.model_runner import ModelRunner
from support.checkpoints import SPECS, is_bfloat16, random_tensors
from support.paddle_checkpoints import paddle_tensors, write_paddle_checkpoint
from worker.new_weights import new_tensors
from worker.test_mixture_updates import of_transformers

MODELS = ("qwen2_tied", "qwen3_bf16", "qwen3_moe", "ernie_moe", "gpt_oss_bf16")
HEAD = "lm_head.weight"


def served(folder, dtype: str) -> dict[str, str]:
    """Return the fingerprints of a server's runner."""
    return ModelRunner(str(folder), num_blocks=8, dtype=dtype).fingerprints


def of(weights, folder, dtype: str = "bfloat16", **options) -> dict[str, str]:
    with TrainerWeights(weights, folder, dtype, **options) as trainer:
        return {name: one.hex for name, one in trainer.fingerprints().items()}


def torch_state(spec) -> dict[str, torch.Tensor]:
    """Return the state of a trainer in torch, in the dtypes of the checkpoint."""
    tensors = {name: torch.from_numpy(one) for name, one in random_tensors(spec).items()}
    return {name: one.bfloat16() if is_bfloat16(spec, name) else one for name, one in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_and_a_state_dict_have_the_fingerprints_of_a_server(name, dtype, checkpoints):
    expected = served(checkpoints[name], dtype)
    assert list(expected.items()) == list(of(checkpoints[name], None, dtype).items())
    assert expected == of(torch_state(SPECS[name]), checkpoints[name], dtype)


def test_frameworks_make_no_difference_and_large_states_are_read_in_parts(checkpoints, monkeypatch):
    folder, tensors = checkpoints["qwen3_moe"], random_tensors(SPECS["qwen3_moe"])
    expected = of(tensors, folder)
    assert expected == of({name: paddle.to_tensor(one) for name, one in tensors.items()}, folder)
    assert expected == of({name: paddle.to_tensor(one).bfloat16() for name, one in tensors.items()}, folder)
    monkeypatch.setattr(trainer_weights, "PART_BYTES", 20_000)
    assert expected == of(dict(reversed(tensors.items())), folder)


def test_stacked_experts_of_transformers_are_those_of_the_checkpoint(checkpoints):
    tensors = random_tensors(SPECS["ernie_moe"])
    assert of(of_transformers(tensors), checkpoints["ernie_moe"]) == of(tensors, checkpoints["ernie_moe"])


@pytest.mark.parametrize("fused", ["", "paddle", "paddleformers"])
def test_layouts_of_paddle_are_those_of_the_checkpoint(fused, tmp_path, checkpoints):
    spec = SPECS["ernie_bias"]
    tensors = random_tensors(spec)
    expected = of(tensors, checkpoints["ernie_bias"])
    folder = write_paddle_checkpoint(tmp_path / "paddle", spec, fused=fused, kind="pdparams")
    assert of(folder, None) == expected
    state = paddle_tensors(spec, tensors, fused)
    assert of(state, checkpoints["ernie_bias"], layout=fused or "paddle") == expected


def test_a_part_of_the_weights_is_known_as_such(checkpoints):
    tensors = random_tensors(SPECS["qwen2"])
    name = next(iter(tensors))
    with TrainerWeights({name: tensors[name]}, checkpoints["qwen2"]) as trainer:
        assert trainer.present == (name,) and len(trainer.shapes) == len(tensors)


def test_a_head_that_is_tied_may_come_and_must_equal_the_embedding(checkpoints):
    folder, tensors = checkpoints["qwen2_tied"], random_tensors(SPECS["qwen2_tied"])
    embedding = tensors["model.embed_tokens.weight"]
    assert of(tensors, folder) == of(tensors | {HEAD: embedding}, folder)
    with pytest.raises(WeightUpdateRefused, match=f"tensor {HEAD}: differs from model.embed_tokens.weight"):
        of(tensors | {HEAD: embedding * 2}, folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"v_head.weight": np.zeros(4, np.float32)}, "tensor v_head.weight: in the state dict is not a tensor"),
        ({"model.norm.weight": np.zeros(3, np.float32)}, "model.norm.weight.*shape"),
        ({"model.norm.weight": np.full(64, np.nan, np.float32)}, "model.norm.weight.*not finite"),
        ({"model.norm.weight": np.full(64, 3.4e38, np.float32)}, "model.norm.weight.*not finite in bfloat16"),
        ({"model.norm.weight": np.zeros(64)}, "model.norm.weight has dtype F64|model.norm.weight.*F64"),
    ],
)
def test_weights_that_no_server_takes_are_refused_by_name(change, told, checkpoints):
    with pytest.raises(WeightUpdateRefused, match=told):
        of(new_tensors(SPECS["qwen2"]) | change, checkpoints["qwen2"])


def test_a_state_dict_needs_the_folder_of_its_model():
    with pytest.raises(InvalidField, match="model: expected a folder with config.json"):
        of({}, None)
