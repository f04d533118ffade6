"""Weight sessions at the worker: for any parts in any order, the weights become those of the trainer, or stay as they
were."""

from __future__ import annotations

import json
import tracemalloc
import uuid
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.weight_source import FileSource, FolderSource, PartFormat, SharedMemorySource
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import to_bfloat16, write_safetensors
from fastdeploy.worker.model_runner import ModelRunner
from support.specs import SPECS
from support.step_driver import outputs, stage, update
from worker.new_weights import HEAD, SPEC, K, Q, V, new_tensors, stored


@pytest.mark.parametrize("order", ["as written", "reversed", "shuffled"])
def test_tensors_that_arrive_one_by_one_in_any_order_make_the_weights_that_were_sent(order, make_runner, part, fresh):
    runner, tensors = make_runner("qwen2"), new_tensors()
    before, names = outputs(runner), list(tensors)
    if order == "reversed":
        names.reverse()
    elif order == "shuffled":
        names = np.random.default_rng(1).permutation(names).tolist()
    staging = runner.begin_update(False, False)
    for name in names:
        receipt = staging.add(part({name: tensors[name]}), {})
        assert receipt == (1, tensors[name].nbytes)
    assert outputs(runner) == before
    runner.commit(staging.finish().weights)
    assert outputs(runner) == fresh(SPEC, tensors)


def test_no_tensor_waits_unpacked_for_the_rest_of_its_linear(make_runner, part, tmp_path):
    spec = replace(SPEC, layers=4, hidden=128, inner=512)
    runner = make_runner(write_checkpoint(tmp_path / "model", spec))
    sources = [part({n: array}) for n, array in new_tensors(spec).items() if "q_proj.weight" in n or "up_proj" in n]
    staging = runner.begin_update(True, False)
    tracemalloc.start()
    try:
        for source in sources:
            staging.add(source, {})
        waiting = tracemalloc.get_traced_memory()[0]  # of numpy's arrays; packed weights are not among them
    finally:
        tracemalloc.stop()
    assert waiting < 4 * 512 * 128 < sum(Path(source.path).stat().st_size for source in sources) / 4


@pytest.mark.parametrize("tensors", ["float32", "bfloat16", "mixed"])
def test_float32_tensors_are_rounded_to_nearest_even_on_every_way_in(tensors, make_runner, part, fresh, tmp_path):
    spec = replace(SPECS["qwen2_bf16"], shards=1)
    new = new_tensors(spec)
    expected = fresh(spec, new)  # written as bfloat16
    as_sent = {
        name: array if tensors == "float32" or (tensors == "mixed" and i % 2) else to_bfloat16(array)
        for i, (name, array) in enumerate(new.items())
    }
    runner = make_runner("qwen2_bf16")
    update(runner, part(as_sent))
    assert outputs(runner) == expected
    float32_folder = write_checkpoint(tmp_path / "f32", replace(spec, dtype="float32"), new)
    at_start = ModelRunner(str(float32_folder), dtype="bfloat16", num_blocks=96, ops=type(runner.ops)("bfloat16"))
    assert outputs(at_start) == expected
    assert at_start.checksums() == runner.checksums()
    update(at_start, write_checkpoint(tmp_path / "base", spec))
    update(at_start, part(as_sent), partial=True)
    assert outputs(at_start) == expected


def test_a_value_that_bfloat16_cannot_hold_is_refused(make_runner, part):
    runner = make_runner("qwen2_bf16")
    array = new_tensors(SPECS["qwen2_bf16"])[Q]
    array[0, 0] = 3.4e38  # finite, but rounds to infinity
    with pytest.raises(WeightUpdateRefused, match=Q):
        stage(runner, part({Q: array}), partial=True)


@pytest.mark.parametrize("kind", ["file", "shared memory"])
def test_every_kind_of_damage_in_a_chunk_is_refused_by_name_and_changes_nothing(kind, make_runner, tmp_path):
    runner, new = make_runner("qwen2"), new_tensors()
    before, weights = outputs(runner), runner.weights
    name = f"fastdeploy-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name if kind == "shared memory" else tmp_path / name
    source = SharedMemorySource(name) if kind == "shared memory" else FileSource(str(path))
    diverged = new[K].copy()
    diverged[-1, -1] = np.nan
    damages = {
        "surplus": ({K: new[K], "model.layers.7.mlp.down_proj.weight": new[K]}, "layers.7"),
        "shape": ({K: new[K][:-1]}, K),
        "dtype": ({K: new[K].astype(np.int8)}, K),
        "nan": ({Q: new[Q], K: diverged}, K),
        "twice": ({V: new[V]}, V),
    }
    try:
        for tensors, named in damages.values():
            staging = runner.begin_update(True, False)
            write_safetensors(path, {V: new[V]})
            staging.add(source, {})
            write_safetensors(path, tensors)
            with pytest.raises(WeightUpdateRefused, match=named):
                staging.add(source, {})
            with pytest.raises(WeightUpdateRefused, match="begin again"):
                staging.finish()
            staging.abandon()
            assert runner.weights is weights
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(WeightUpdateRefused, match=name):
            runner.begin_update(True, False).add(source, {})
    finally:
        path.unlink()
    assert outputs(runner) == before


def test_a_full_update_that_lacks_a_tensor_names_it(make_runner, part):
    runner, tensors = make_runner("qwen2"), new_tensors()
    for gone in (K, "model.norm.weight", HEAD):
        with pytest.raises(WeightUpdateRefused, match=gone) as error:
            stage(runner, part({name: array for name, array in tensors.items() if name != gone}))
        assert error.value.detail == {"tensor": gone}


def test_a_lack_of_memory_while_staging_is_reported_and_changes_nothing(make_runner, part, monkeypatch):
    runner = make_runner("qwen2")
    before = outputs(runner)

    with monkeypatch.context() as patch:
        patch.setattr(runner.ops, "new_linear", Mock(side_effect=MemoryError("no memory for a packed weight")))
        with pytest.raises(OutOfSpace):
            stage(runner, part(new_tensors()))
    assert outputs(runner) == before


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_bf16"])
def test_fingerprints_are_those_of_the_tensors_that_serve(name, make_runner, part, tmp_path):
    spec = replace(SPECS[name], shards=1)
    runner, tensors = make_runner(name), random_tensors(spec)

    def expected() -> str:
        return over_all({name: fingerprint(stored(array, spec)) for name, array in tensors.items()})

    assert runner.fingerprint == expected()
    tensors[K] = new_tensors(spec)[K]
    staging = runner.begin_update(True, False)
    before = runner.fingerprint
    staging.add(part({K: stored(tensors[K], spec)}), {})
    staged = staging.finish()
    assert staged.fingerprint == expected() and runner.fingerprint == before
    runner.commit(staged.weights)
    assert runner.fingerprint == expected()
    update(runner, write_checkpoint(tmp_path / "c", replace(spec, seed=99)))
    tensors = new_tensors(spec)
    assert runner.fingerprint == expected()


def test_a_fingerprint_of_a_part_is_checked_and_names_the_tensor(make_runner, part):
    runner, new = make_runner("qwen2"), new_tensors()
    right = {name: fingerprint(new[name]).hex for name in (Q, K)}
    assert runner.begin_update(True, False).add(part({Q: new[Q], K: new[K]}), {}, form=PartFormat(fingerprints=right))
    for wrong, named in (({Q: right[K]}, Q), ({V: right[K]}, V)):
        with pytest.raises(WeightUpdateRefused, match=named):
            runner.begin_update(True, False).add(part({Q: new[Q]}), {}, form=PartFormat(fingerprints=wrong))


EOS = {"one": ({"eos_token_id": 7}, (7,)), "two": ({"eos_token_id": [7, 3, 7]}, (7, 3)), "none": ({}, None)}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("generation", "expected"), EOS.values(), ids=EOS)
def test_the_eos_ids_of_generation_config_come_with_the_weights(generation, expected, partial, make_runner, tmp_path):
    runner, folder = make_runner("qwen2"), write_checkpoint(tmp_path / "c", SPEC)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if partial:
        (folder / "config.json").unlink()
    staging = runner.begin_update(partial, False)
    staging.add(FolderSource(str(folder)), {})
    assert staging.finish().eos_token_ids == expected
    (folder / "generation_config.json").unlink()
    staging = runner.begin_update(True, False)
    staging.add(FolderSource(str(folder)), {})
    assert staging.finish().eos_token_ids is None


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": -1}', '{"eos_token_id": "x"}', '{"eos_token_id": true}'])
def test_a_malformed_generation_config_is_refused_by_name(text, make_runner, tmp_path):
    runner, folder = make_runner("qwen2"), write_checkpoint(tmp_path / "c", SPEC)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(WeightUpdateRefused, match="generation_config.json"):
        stage(runner, folder)
