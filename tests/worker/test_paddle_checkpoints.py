"""A checkpoint in Paddle's layout makes the same weights, to the bit, as the same values in the layout of Hugging Face:
at the start, and as an update of a runner that was started from the other one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy import LLM
from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FileSource, FolderSource, PartFormat
from fastdeploy.rl.scoring import Scorer
from fastdeploy.testing.checkpoints import Spec, config_json, random_tensors, write_checkpoint
from fastdeploy.testing.tensors import write_safetensors
from support.paddle_checkpoints import paddle_tensors, write_paddle_checkpoint
from support.specs import SPECS
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
    ("ernie_moe", "float32", "", "safetensors", False, 2),
    ("ernie_moe", "bfloat16", "paddle", "uint16", False, 1),
    ("ernie_moe", "float32", "paddle", "pdparams", True, 1),
    ("glm_moe", "float32", "paddleformers", "safetensors", False, 1),
    ("gpt_oss", "bfloat16", "paddle", "uint16", False, 2),
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


@pytest.mark.covers("case", "make_runner")
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


def test_an_engine_started_from_one_layout_serves_the_other_after_an_update_call(checkpoints, tmp_path):
    new = new_tensors(SPECS["ernie"])
    theirs = write_paddle_checkpoint(
        tmp_path / "paddle", replace(SPECS["ernie"], dtype="float32"), new, "paddle", "pdparams"
    )
    ours = write_checkpoint(tmp_path / "hf", SPECS["ernie"], new)
    with LLM(str(checkpoints["ernie"]), num_gpu_blocks_override=16, max_model_len=128, dtype="float32") as llm:
        reports = [llm.update_weights(str(folder)) for folder in (theirs, checkpoints["ernie"], ours)]
        assert reports[0]["fingerprint"] == reports[2]["fingerprint"] != reports[1]["fingerprint"]
        assert llm.weights(checksums=True)["checksums"] == {name: sha(array) for name, array in new.items()}


@pytest.mark.parametrize("shape", ["[vocabulary, hidden]", "[hidden, vocabulary]"])
def test_a_tied_head_may_come_in_both_shapes_and_must_equal_the_embedding(shape, make_runner, tmp_path):
    runner, new = make_runner("ernie"), new_tensors(SPECS["ernie"])
    head = new["model.embed_tokens.weight"]
    head = head if shape == "[vocabulary, hidden]" else head.T
    path = tmp_path / "upload"
    for factor in (1, 2):
        tensors = paddle_tensors(SPECS["ernie"], new) | {"lm_head.weight": np.ascontiguousarray(head * factor)}
        write_safetensors(path, tensors)
        staging = runner.begin_update(False, False)
        if factor == 1:
            staging.add(FileSource(str(path)), {}, form=PartFormat(layout="paddle"))
            staging.finish()
            staging.abandon()
            continue
        with pytest.raises(WeightUpdateRefused, match="differs from model.embed_tokens.weight"):
            staging.add(FileSource(str(path)), {}, form=PartFormat(layout="paddle"))


@pytest.mark.parametrize("layout", ["paddle", "paddleformers"])
def test_a_square_head_is_read_as_the_writer_of_the_layout_keeps_it(layout, make_runner, tmp_path):
    spec = replace(SPECS["qwen2"], shards=1, vocab=64)
    right = make_runner(write_checkpoint(tmp_path / "hf", spec))
    assert (
        make_runner(write_paddle_checkpoint(tmp_path / "paddle", spec, fused=layout)).fingerprint == right.fingerprint
    )


def test_a_scorer_reads_a_paddle_folder(checkpoints, tmp_path):
    folder = write_paddle_checkpoint(tmp_path / "paddle", SPECS["ernie_bias"], fused="paddleformers")
    scorers = [Scorer(str(path), "float32") for path in (folder, checkpoints["ernie_bias"])]
    found, wanted = ({name: tensor.numpy() for name, tensor in one.parameters.items()} for one in scorers)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_tensor_that_is_in_two_forms_or_has_too_few_bytes_is_refused(make_runner, tmp_path):
    runner, spec = make_runner("ernie_bias"), SPECS["ernie_bias"]
    path, form = tmp_path / "upload", PartFormat(layout="paddle")
    fused, apart = (paddle_tensors(spec, new_tensors(spec), kind) for kind in ("paddle", ""))
    name = "model.layers.0.self_attn.k_proj.weight"
    write_safetensors(path, fused | {name: apart[name]})
    with pytest.raises(WeightUpdateRefused, match=r"k_proj.weight: .*has the values of .*qkv_proj.weight"):
        runner.begin_update(True, False).add(FileSource(str(path)), {}, form=form)
    write_safetensors(path, {name: apart[name][:1]}, {"float32": "U16"})
    raw = path.read_bytes().replace(b"[1, 48]", b"[64,48]")
    path.write_bytes(raw)
    with pytest.raises(WeightUpdateRefused, match="do not make U16"):
        runner.begin_update(True, False).add(FileSource(str(path)), {}, form=form)


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
    path, tensors = tmp_path / "upload", paddle_tensors(spec, random_tensors(spec), "paddle")
    write_safetensors(path, {name: array for name, array in tensors.items() if "qkv" in name})
    with pytest.raises(WeightUpdateRefused, match=r"qkv_proj.\w+: .* is fused, .*chosen by no layout in the call"):
        stage(runner, FileSource(str(path)), partial=True)
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
    # A snapshot of FastDeploy lies beside the config of a Hugging Face folder, too. It may be a file of safetensors.
    (folder / "config.json").write_text(json.dumps(config_json(spec)))
    assert stage(runner, FolderSource(str(folder))).fingerprint == runner.fingerprint
    write_safetensors(folder / "model_state.tp0.7.pdparams", paddle_tensors(spec, random_tensors(spec), "paddle", True))
    assert stage(runner, FolderSource(str(folder))).fingerprint == runner.fingerprint
    tensors = list(paddle_tensors(spec, random_tensors(spec), "paddle", True).items())
    for i in range(2):
        write_safetensors(folder / f"model_state.tp0.7.part{i}.pdparams", dict(tensors[i::2]))
    assert stage(runner, FolderSource(str(folder))).fingerprint == runner.fingerprint
