"""An update from a folder happens as a whole or not at all: after a refusal the old weights serve, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.testing.checkpoints import config_json, random_tensors, write_checkpoint
from fastdeploy.testing.tensors import write_safetensors
from support.specs import SPECS
from support.step_driver import outputs, stage, update

SPEC = SPECS["qwen3"]
Q, DOWN, NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
SURPLUS = "model.layers.2.input_layernorm.weight"
SINGLE, INDEX, SECOND = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"
Tensors = dict[str, np.ndarray]
Damage = Callable[[Path], object]


def _write(folder: Path, edit: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    spec = replace(SPEC, seed=99, shards=1)
    tensors = random_tensors(spec)
    edit(tensors)
    return write_checkpoint(folder, spec, tensors)


def _tensors(edit: Callable[[Tensors], object]) -> Damage:
    return lambda folder: _write(folder, edit)


def _bytes(edit: Callable[[bytes], bytes]) -> Damage:
    """Edit the bytes of the only safetensors file."""
    return lambda folder: (path := _write(folder) / SINGLE).write_bytes(edit(path.read_bytes()))


def _index(edit: Callable[[dict[str, str]], dict[str, str]]) -> Damage:
    """Edit the weight_map in the index of a folder with three shards."""

    def damage(folder: Path) -> None:
        path = write_checkpoint(folder, SPEC) / INDEX
        path.write_text(json.dumps({"weight_map": edit(json.loads(path.read_text())["weight_map"])}))

    return damage


def _model(**changes: object) -> Damage:
    return lambda folder: write_checkpoint(folder, replace(SPEC, **changes))


def _shifted_end(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[Q]["data_offsets"][1] -= 4
    return data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :]


def _pickle_only(folder: Path) -> None:
    (_write(folder) / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def _tensor_in_two_shards(folder: Path) -> None:
    _index(lambda names: names | {NORM: "model-00004.safetensors"})(folder)
    write_safetensors(folder / "model-00004.safetensors", {name: random_tensors(SPEC)[name] for name in (Q, NORM)})


def _quantised(folder: Path) -> None:
    (_write(folder) / "config.json").write_text(json.dumps(config_json(SPEC) | {"quantization_config": {"bits": 4}}))


# The damage, and a part of the message that refuses it.
DAMAGE: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (_tensors(lambda t: t.pop(Q)), Q),
    "a tensor too many": (_tensors(lambda t: t.update({SURPLUS: np.ones(64, np.float32)})), SURPLUS),
    "a row is missing": (_tensors(lambda t: t.update({Q: t[Q][:-1]})), Q),
    "transposed": (_tensors(lambda t: t.update({DOWN: t[DOWN].T})), DOWN),
    "integers": (_tensors(lambda t: t.update({Q: t[Q].astype(np.int8)})), Q),
    "truncated": (_bytes(lambda data: data[:-5]), SINGLE),
    "trailing bytes": (_bytes(lambda data: data + b"tail"), SINGLE),
    "an empty file": (_bytes(lambda data: b""), SINGLE),
    "a broken header": (_bytes(lambda data: data[:8] + b"}{}{" + data[12:]), SINGLE),
    "a header that is too long": (_bytes(lambda data: (1 << 60).to_bytes(8, "little") + data[8:]), SINGLE),
    "offsets that do not fit the shape": (_bytes(_shifted_end), Q),
    "a pickle only": (_pickle_only, "has neither"),
    "a shard is missing": (lambda folder: (write_checkpoint(folder, SPEC) / SECOND).unlink(), SECOND),
    "an index that leaves the folder": (
        _index(lambda names: {name: file.replace(SECOND, f"../{SECOND}") for name, file in names.items()}),
        "plain file names",
    ),
    "an index with a wrong shard": (
        _index(lambda names: names | {Q: next(file for file in names.values() if file != names[Q])}),
        Q,
    ),
    "a tensor in two shards": (_tensor_in_two_shards, "model-00004.safetensors"),
    "no folder": (lambda folder: None, "cannot be opened as a folder"),
    "no config": (lambda folder: (_write(folder) / "config.json").unlink(), "config.json"),
    "another depth": (_model(layers=3), "num_hidden_layers"),
    "another rope": (_model(extra={"rope_theta": 123.0}), "rope_theta"),
    "another architecture": (lambda folder: write_checkpoint(folder, SPECS["qwen2"]), "architecture"),
    "quantised": (_quantised, "quantization_config"),
}


def test_every_kind_of_damage_is_refused_by_name_and_changes_nothing(make_runner, tmp_path):
    runner = make_runner("qwen3")
    before, weights = outputs(runner), runner.weights
    for kind, (damage, named) in DAMAGE.items():
        damage(folder := tmp_path / kind)
        with pytest.raises(WeightUpdateRefused) as error:
            stage(runner, folder)
        assert named in error.value.message, kind
        assert runner.weights is weights, kind
    assert outputs(runner) == before


def test_a_file_that_shrinks_while_it_is_read_is_refused(make_runner, tmp_path, monkeypatch):
    runner = make_runner("qwen3")
    before = outputs(runner)
    folder = _write(tmp_path / "shrinks")
    read = runner.ops.stage

    def shrink_then_read(items, stop, dtype):
        os.truncate(folder / SINGLE, 2000)
        return read(items, stop)

    monkeypatch.setattr(runner.ops, "stage", shrink_then_read)
    with pytest.raises(WeightUpdateRefused, match="cut short"):
        stage(runner, folder)
    assert outputs(runner) == before


def test_staging_alone_changes_nothing_and_commit_equals_a_start_on_the_new_folder(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    before, fresh = outputs(runner), outputs(make_runner(folder))
    staged = stage(runner, folder)
    assert outputs(runner) == before != fresh
    runner.commit(staged)
    assert outputs(runner) == fresh


def test_the_folder_may_be_deleted_as_soon_as_stage_returns(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    fresh = outputs(make_runner(folder))
    staged = stage(runner, folder)
    for file in folder.iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)  # a lazy mapping would now read zeros
    shutil.rmtree(folder)
    runner.commit(staged)
    assert outputs(runner) == fresh


def test_staging_beside_steps_changes_none_of_them(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    before, fresh, staged = outputs(runner), outputs(make_runner(folder)), []
    thread = threading.Thread(target=lambda: staged.append(stage(runner, folder)))
    thread.start()
    during = [outputs(runner)]
    while thread.is_alive():
        during.append(outputs(runner))
    thread.join()
    assert all(found == before for found in during)
    runner.commit(staged[0])
    assert outputs(runner) == fresh


def test_infinite_keys_and_values_of_replaced_weights_do_no_harm(make_runner, tmp_path):
    runner = make_runner("qwen3")
    before, good = outputs(runner), stage(runner, write_checkpoint(tmp_path / "good", SPEC))
    name = "model.layers.0.self_attn.v_proj.weight"  # finite, as it must be, but its sums are not
    broken = _write(tmp_path / "huge", lambda t: t.update({name: np.sign(t[name]) * np.float32(3e38)}))
    update(runner, broken)
    outputs(runner)  # fills the blocks with infinities
    runner.commit(good)
    assert outputs(runner) == before
