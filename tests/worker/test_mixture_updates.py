"""Updates of a mixture of experts. All experts of a layer are parts of one packed weight: none of them may be missing,
keep the values of an earlier update, or take those of another expert."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FileSource, FolderSource
from fastdeploy.model_executor.safetensors_source import open_source
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from support.delta_trainer import Trainer
from support.deltas import write_delta
from support.paddle_checkpoints import stacked, write_paddle_checkpoint
from support.specs import SPECS
from support.step_driver import outputs, stage, update
from support.torch_generation import state_shapes
from worker.new_weights import Tensors, new_tensors, sha, stored

ERNIE, GLM = (replace(SPECS[name], shards=1) for name in ("ernie_moe", "glm_moe"))
LAYER = "model.layers.1.mlp."
PARTIAL = {
    "gate of one expert": ["experts.3.gate_proj.weight"],
    "down of two experts": ["experts.0.down_proj.weight", "experts.5.down_proj.weight"],
    "the router and its bias": ["gate.weight", "moe_statics.e_score_correction_bias"],
    "the shared expert": ["shared_experts.up_proj.weight"],
}
# The layer that predicts further tokens, as Baidu and Zhipu publish it.
MORE = {
    "ernie_moe": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"],
    "glm_moe": ["model.layers.3.enorm.weight", "model.layers.3.mlp.experts.0.up_proj.weight"],
}


@pytest.mark.parametrize("names", PARTIAL.values(), ids=PARTIAL.keys())
def test_a_partial_update_changes_the_experts_that_it_has_and_no_other(names, make_runner, part):
    runner, old, new = make_runner("ernie_moe"), random_tensors(ERNIE), new_tensors(ERNIE)
    before, changed = outputs(runner), [LAYER + name for name in names]
    update(runner, *(part({name: new[name]}) for name in changed), partial=True)
    assert runner.checksums() == sums(old | {name: new[name] for name in changed})
    assert outputs(runner) != before


def test_experts_that_arrive_in_parts_are_those_that_were_sent_in_each_sync(make_runner, part, fresh):
    runner = make_runner("ernie_moe")
    for seed in (5, 6):
        tensors = new_tensors(ERNIE, seed)
        names = np.random.default_rng(seed).permutation(list(tensors)).tolist()
        staging = runner.begin_update(False, False)
        for first in range(0, len(names), 7):  # parts have some experts of a layer, and no layer comes whole
            staging.add(part({name: tensors[name] for name in names[first : first + 7]}), {})
        runner.commit(staging.finish().weights)
        assert runner.checksums() == sums(tensors)
    assert outputs(runner) == fresh(ERNIE, tensors)


@pytest.mark.parametrize("gone", ["experts.4.down_proj.weight", "moe_statics.e_score_correction_bias", "gate.weight"])
def test_a_full_update_without_an_expert_names_it_and_changes_nothing(gone, make_runner, part):
    runner, tensors = make_runner("ernie_moe"), new_tensors(ERNIE)
    before = runner.checksums()
    with pytest.raises(WeightUpdateRefused, match="is missing") as error:
        stage(runner, part({name: array for name, array in tensors.items() if name != LAYER + gone}))
    assert error.value.detail == {"tensor": LAYER + gone} and runner.checksums() == before


def test_an_expert_that_the_model_does_not_have_is_refused_by_name(make_runner, part):
    name = LAYER + "experts.6.up_proj.weight"
    with pytest.raises(WeightUpdateRefused, match=f"{name}: .* is not a tensor of this model"):
        stage(make_runner("ernie_moe"), part({name: np.zeros((32, 64), np.float32)}), partial=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deltas_of_experts_make_the_weights_of_the_trainer_in_turn(dtype, make_runner, tmp_path):
    runner = make_runner("glm_moe", dtype=dtype, standby_weights="on")
    trainer = Trainer(runner, tmp_path, "glm_moe")
    for names in (
        ["experts.2.up_proj"],
        ["experts.0.down_proj", "experts.7.gate_proj"],
        ["gate"],
        ["experts.2.up_proj"],
    ):
        trainer.publish(trainer.next_state(*(f"{LAYER}{name}.weight" for name in names)))
        trainer.check()
        if names == ["gate"]:
            runner.refresh_standby()
    trainer.publish(trainer.next_state(LAYER + "gate.e_score_correction_bias"))
    trainer.check()


def test_the_bias_of_a_router_is_float32_in_a_bfloat16_engine(make_runner, part, tmp_path):
    """bfloat16 has steps of 0.25 at 34.5, and makes all values of the bias equal."""
    name, spec = LAYER + "gate.e_score_correction_bias", replace(GLM, dtype="bfloat16")
    biases = [(34.5 + np.random.default_rng(seed).normal(0, 0.05, 8)).astype(np.float32) for seed in range(3)]
    runner = make_runner(write_checkpoint(tmp_path / "bf16", spec, random_tensors(spec) | {name: biases[0]}))
    served = {str(outputs(runner))}
    update(runner, part({name: biases[1]}), partial=True)
    assert runner.checksums()[name] == sha(biases[1])
    staging = runner.begin_update(False, delta=True)
    source, form = write_delta(tmp_path / "delta", {name: biases[1]}, {name: biases[2]})
    staging.add(source, {}, form=form)
    runner.commit(staging.finish().weights)
    np.testing.assert_array_equal(runner.weights.layers[1].blocks[1].routing.bias.numpy(), biases[2])
    served.add(str(outputs(runner)))
    assert len(served) == 2
    runner.export(str(tmp_path / "export"))
    with open_source(FileSource(str(tmp_path / "export"))) as reader:
        np.testing.assert_array_equal(reader.read(name), biases[2])
        assert {entry.dtype for one, entry in reader.entries.items() if not one.endswith("bias")} == {"BF16"}


@pytest.mark.parametrize("name", MORE)
def test_the_layer_that_predicts_further_tokens_is_ignored(name, make_runner, tmp_path):
    spec, more = replace(SPECS[name], shards=1), {one: np.ones(64, np.float32) for one in MORE[name]}
    new = new_tensors(spec)
    folder = write_checkpoint(tmp_path / "new", spec, new | more)
    (folder / "checksums.json").write_text(json.dumps(sums(new | more)))
    runner = make_runner(folder)
    assert runner.checksums() == sums(new)
    update(runner, write_paddle_checkpoint(tmp_path / "old", spec, random_tensors(spec) | more, fastdeploy_names=True))
    assert runner.checksums() == sums(random_tensors(spec))
    staging = runner.begin_update(False, False)
    staging.add(FolderSource(str(folder)), dict.fromkeys(more, sha(more[MORE[name][0]])), verify_checksum=True)
    runner.commit(staging.finish().weights)
    assert runner.checksums() == sums(new)


def test_a_delta_of_the_layer_that_predicts_further_tokens_is_ignored(make_runner, tmp_path):
    trainer = Trainer(make_runner("ernie_moe", standby_weights="on"), tmp_path, "ernie_moe")
    new = trainer.next_state(LAYER + "experts.1.up_proj.weight")
    zeros, ones = ({name: np.full(64, value, "<f4") for name in MORE["ernie_moe"]} for value in (0, 1))
    source, form = write_delta(tmp_path / "delta", trainer.state | zeros, new | ones)
    staging = trainer.begin()
    staging.add(source, {}, form=form)
    trainer.runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.check()


@pytest.mark.parametrize("name", ["ernie_moe", "glm_moe", "qwen3_moe"])
def test_the_tensors_of_a_model_of_transformers_make_the_same_weights(
    name, make_runner, checkpoints, torch_process, part
):
    spec = replace(SPECS[name], shards=1)
    runner, new = make_runner(name), new_tensors(spec)
    theirs = of_transformers(new)
    assert {one: list(array.shape) for one, array in theirs.items()} == torch_process.run(
        state_shapes, checkpoints[name]
    )
    update(runner, part(theirs))
    assert runner.checksums() == sums(new)
    expert = f"model.layers.{spec.experts_layers[0]}.mlp.experts.0.up_proj.weight"
    with pytest.raises(WeightUpdateRefused, match="has the values of"):
        stage(runner, part(theirs | {expert: new[expert]}))


def sums(tensors: Tensors) -> dict[str, str]:
    return {name: sha(array) for name, array in tensors.items()}


def of_transformers(tensors: Tensors) -> Tensors:
    """Return the tensors as a model of transformers has them: ``state_dict()``."""
    merged: Tensors = {}
    for name, array in tensors.items():
        name = name.replace(".mlp.moe_statics.", ".mlp.gate.moe_statics.")
        if ".mlp.experts." in name and "gate_proj" in name:
            both = [array, tensors[name.replace("gate_proj", "up_proj")]]
            merged[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both)
        elif ".mlp.experts." not in name or "up_proj" not in name:
            merged[name] = array
    return {name.replace("_proj_weight", "_proj"): array for name, array in stacked(merged).items()}


@pytest.mark.covers("make_runner name", "make_runner names", "name names")
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_bf16"])
@pytest.mark.parametrize(
    "names",
    [
        ["mlp.experts.gate_up_proj"],
        ["mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_bias", "mlp.router.bias"],
        ["mlp.experts.down_proj", "self_attn.sinks"],
    ],
    ids=lambda names: names[0],
)
def test_tensors_of_all_experts_are_updated_one_by_one(name, names, make_runner, part, fresh):
    spec = replace(SPECS[name], shards=1)
    runner, old, new = make_runner(name), random_tensors(spec), new_tensors(spec)
    before, changed = outputs(runner), [f"model.layers.1.{one}" for one in names]
    update(runner, *(part({one: stored(new[one], spec)}) for one in changed), partial=True)
    mixture = old | {one: new[one] for one in changed}
    assert runner.checksums() == sums({one: stored(array, spec) for one, array in mixture.items()})
    assert outputs(runner) == fresh(spec, mixture) != before
