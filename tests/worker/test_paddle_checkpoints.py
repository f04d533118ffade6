"""A checkpoint in Paddle's layout makes the same weights, to the bit, as the same values in the layout of Hugging Face:
at the start, and as an update of a runner that was started from the other one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FileSource, FolderSource, PartFormat
from support.checkpoints import SPECS, Spec, config_json, random_tensors, write_checkpoint, write_safetensors
from support.paddle_checkpoints import paddle_tensors, write_paddle_checkpoint
from support.step_driver import outputs, stage, update
from worker.new_weights import new_tensors, sha

# The spec, its dtype, how q, k and v are fused, the kind of the files, FastDeploy's names, and how many files.
FOLDERS = [
    ("ernie", "bfloat16", "", "safetensors", False, 1),
    ("ernie", "float32", "paddle", "pdparams", True, 1),
    ("ernie_bias", "float32", "paddleformers", "safetensors", False, 3),
    ("ernie_bias", "float16", "paddle", "safetensors", False, 1),
    ("qwen2", "float32", "", "pdparams", False, 2),
    ("qwen2", "bfloat16", "paddleformers", "pdparams", False, 1),
    ("qwen3", "bfloat16", "paddle", "uint16", False, 2),
    ("llama_tied", "float32", "paddle", "safetensors", False, 1),
]


def spec_of(name: str, dtype: str) -> Spec:
    return replace(SPECS[name], dtype=dtype, shards=1)


def huggingface(folder, spec: Spec, tensors: dict[str, np.ndarray]):
    """Write a folder in the layout of Hugging Face, rounded to the dtype of the spec."""
    if spec.dtype == "float16":
        spec, tensors = (
            replace(spec, dtype="float32"),
            {n: a.astype(np.float16).astype("f4") for n, a in tensors.items()},
        )
    return write_checkpoint(folder, spec, tensors)


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: "-".join(map(str, case)))
def test_a_paddle_folder_makes_the_same_weights_at_the_start_and_as_an_update(case, make_runner, tmp_path):
    name, dtype, fused, kind, names, files = case
    spec = spec_of(name, dtype)
    first, second = random_tensors(spec), new_tensors(spec)
    theirs = [
        write_paddle_checkpoint(tmp_path / f"bf16-paddle-{i}", spec, tensors, fused, kind, names, files)
        for i, tensors in enumerate((first, second))
    ]
    ours = [huggingface(tmp_path / f"bf16-hf-{i}", spec, tensors) for i, tensors in enumerate((first, second))]
    from_paddle, from_torch = make_runner(theirs[0]), make_runner(ours[0])
    assert from_paddle.fingerprint == from_torch.fingerprint
    assert from_paddle.checksums() == from_torch.checksums()
    expected = outputs(from_torch)
    assert outputs(from_paddle) == expected
    update(from_torch, theirs[1])
    update(from_paddle, ours[1])
    assert from_torch.fingerprint == from_paddle.fingerprint
    assert outputs(from_torch) == outputs(from_paddle) != expected


def test_a_square_weight_is_read_as_the_folder_says(make_runner, tmp_path):
    spec = replace(SPECS["qwen2"], shards=1, head_dim=16, kv_heads=4, inner=64)  # all weights of a layer are square
    right = make_runner(write_checkpoint(tmp_path / "hf", spec))
    assert make_runner(write_paddle_checkpoint(tmp_path / "paddle", spec)).fingerprint == right.fingerprint
    for i, keys in enumerate(({"transformers_version": "4.56.0"}, {"torch_dtype": "float32"})):
        folder = write_checkpoint(tmp_path / f"again-{i}", spec)
        raw = {k: v for k, v in config_json(spec).items() if k != "torch_dtype"} | {"dtype": "float32"} | keys
        (folder / "config.json").write_text(json.dumps(raw))
        assert make_runner(folder).fingerprint == right.fingerprint
    turned = write_paddle_checkpoint(tmp_path / "saved", spec, source="paddle", torch_dtype="float32")
    assert make_runner(turned).fingerprint == right.fingerprint


def test_the_layout_of_an_upload_is_that_of_the_call(make_runner, tmp_path):
    runner, tensors = make_runner("ernie_bias"), new_tensors(SPECS["ernie_bias"])
    path = tmp_path / "upload"
    write_safetensors(path, paddle_tensors(SPECS["ernie_bias"], tensors, "paddle"))
    staging = runner.begin_update(False, False)
    staging.add(FileSource(str(path)), {}, form=PartFormat(layout="paddle"))
    runner.commit(staging.finish().weights)
    update_of = make_runner(write_checkpoint(tmp_path / "hf", SPECS["ernie_bias"], tensors))
    assert runner.fingerprint == update_of.fingerprint


def test_a_partial_update_in_paddles_layout_changes_the_tensors_that_it_has(make_runner, tmp_path):
    spec = SPECS["ernie_bias"]
    runner, new = make_runner("ernie_bias"), new_tensors(spec)
    changed = [name for name in new if "layers.1.self_attn.q_proj" in name or "layers.1.mlp.down" in name]
    path = tmp_path / "upload"
    write_safetensors(path, paddle_tensors(spec, {name: new[name] for name in changed}))
    staging = runner.begin_update(True, False)
    staging.add(FileSource(str(path)), {}, form=PartFormat(layout="paddle"))
    runner.commit(staging.finish().weights)
    mixed = random_tensors(spec) | {name: new[name] for name in changed}
    assert runner.fingerprint == make_runner(write_checkpoint(tmp_path / "hf", spec, mixed)).fingerprint


def test_checksums_are_those_of_the_layout_of_hugging_face(make_runner, tmp_path):
    spec = spec_of("ernie_bias", "float32")
    new = new_tensors(spec)
    folder = write_paddle_checkpoint(tmp_path / "paddle", spec, new, "paddleformers")
    sums = {name: sha(array) for name, array in new.items()}
    (folder / "checksums.json").write_text(json.dumps(sums))
    runner = make_runner("ernie_bias")
    staging = runner.begin_update(False, False)
    staging.add(FolderSource(str(folder)), {}, verify_checksum=True)
    runner.commit(staging.finish().weights)
    assert runner.checksums() == sums
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(WeightUpdateRefused, match=name):
        runner.begin_update(False, False).add(FolderSource(str(folder)), {name: "0" * 64}, verify_checksum=False)


@pytest.mark.parametrize("layout", ["huggingface", "paddle"])
def test_a_wrong_layout_is_refused_by_the_tensor_and_the_reason(layout, make_runner, tmp_path):
    runner, spec = make_runner("qwen2"), SPECS["qwen2"]
    before = runner.fingerprint
    write = write_paddle_checkpoint if layout == "huggingface" else write_checkpoint
    folder = write(tmp_path / "model", replace(spec, shards=1))
    with pytest.raises(WeightUpdateRefused, match="the layout of the call") as error:
        form = PartFormat(layout=layout)
        runner.begin_update(False, False).add(FolderSource(str(folder)), {}, form=form)
    assert error.value.detail["tensor"] in random_tensors(spec) and f"layout '{layout}'" in str(error.value)
    raw = config_json(spec) if layout == "huggingface" else paddle_raw(spec)
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(WeightUpdateRefused, match="config.json"):
        stage(runner, FolderSource(str(folder)))
    assert runner.fingerprint == before


def paddle_raw(spec: Spec) -> dict:
    return {("dtype" if key == "torch_dtype" else key): value for key, value in config_json(spec).items()}


def test_a_folder_with_two_kinds_of_weights_and_a_snapshot_of_many_ranks_are_refused(make_runner, tmp_path):
    runner, spec = make_runner("ernie"), SPECS["ernie"]
    folder = write_paddle_checkpoint(tmp_path / "model", spec, fused="paddle", kind="pdparams", fastdeploy_names=True)
    state = folder / "model_state.pdparams"
    write_safetensors(folder / "model.safetensors", random_tensors(spec))
    with pytest.raises(WeightUpdateRefused, match=r"model.safetensors and model_state.pdparams: which"):
        stage(runner, FolderSource(str(folder)))
    (folder / "model.safetensors").unlink()
    state.rename(folder / "model_state.tp1.0.pdparams")
    with pytest.raises(WeightUpdateRefused, match="only a snapshot of one rank"):
        stage(runner, FolderSource(str(folder)))
    (folder / "model_state.tp1.0.pdparams").rename(folder / "model_state.tp0.7.pdparams")
    # A snapshot of FastDeploy lies beside the config of a Hugging Face folder, too.
    (folder / "config.json").write_text(json.dumps(config_json(spec)))
    assert stage(runner, FolderSource(str(folder))).fingerprint == runner.fingerprint
