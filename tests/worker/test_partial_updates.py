"""Partial updates: tensors that do not arrive keep the values that serve."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.testing.checkpoints import random_tensors
from fastdeploy.testing.tensors import write_safetensors
from support.specs import SPECS
from support.step_driver import outputs, update
from worker.new_weights import EMBEDDING, KV_B, NORM, SPEC, K, Q, V, new_tensors, stored

PARTIAL = {
    "one part of qkv": [Q],
    "a bias of qkv": [Q.replace("q_proj.weight", "k_proj.bias")],
    "one of gate and up": ["model.layers.0.mlp.up_proj.weight"],
    "the embedding": [EMBEDDING],
    "a norm": ["model.layers.0.input_layernorm.weight", "model.norm.weight"],
    "a bit of everything": [V, K.replace("weight", "bias"), "model.layers.0.mlp.down_proj.weight", EMBEDDING],
}


@pytest.mark.covers("make_runner base", "make_runner names", "base names")
@pytest.mark.parametrize("names", PARTIAL.values(), ids=PARTIAL.keys())
@pytest.mark.parametrize("base", ["llama_tied", "qwen2_bf16", "gemma_biased"])
def test_a_partial_update_equals_a_start_on_the_mixture(base, names, make_runner, part, fresh):
    spec = replace(SPECS[base], shards=1)
    runner, old, new = make_runner(base), random_tensors(spec), new_tensors(spec)
    before = outputs(runner)
    update(runner, *(part({name: stored(new[name], spec)}) for name in names), partial=True)
    mixture = old | {name: new[name] for name in names}
    assert outputs(runner) == fresh(spec, mixture) != before


def test_an_update_of_kv_b_proj_makes_the_absorbed_weights_anew(make_runner, part, fresh):
    spec = replace(SPECS["deepseek"], shards=1)
    runner, new = make_runner("deepseek"), new_tensors(spec)
    before = outputs(runner)
    update(runner, part({KV_B: new[KV_B]}), partial=True)
    assert outputs(runner) == fresh(spec, random_tensors(spec) | {KV_B: new[KV_B]}) != before


def test_a_partial_update_packs_only_what_it_changed(make_runner, part):
    runner, tensors = make_runner("qwen2"), new_tensors()
    old = runner.weights
    update(runner, part({Q: tensors[Q], NORM: tensors[NORM]}), partial=True)
    changed = {key for key, value in runner.weights.values.items() if value is not old.values[key]}
    assert changed == {"layers.1.qkv", "norm"}


def test_partial_updates_add_up_and_complete_from_what_serves_at_the_commit(make_runner, part, fresh):
    runner, tensors = make_runner("qwen2"), random_tensors(SPEC)
    for seed, name in enumerate((Q, K, V, Q, EMBEDDING), 70):
        tensors[name] = new_tensors(seed=seed)[name]
        update(runner, part({name: tensors[name]}), partial=True)
    assert outputs(runner) == fresh(SPEC, tensors)


def test_a_partial_folder_needs_no_config_but_must_not_have_another_models(make_runner, tmp_path, fresh):
    runner, new, folder = make_runner("qwen2"), new_tensors(), tmp_path / "part"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {Q: new[Q]})
    update(runner, folder, partial=True)
    assert outputs(runner) == fresh(SPEC, random_tensors(SPEC) | {Q: new[Q]})
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(WeightUpdateRefused, match="config.json"):
        update(runner, folder, partial=True)
