"""A weight update is all or nothing: whatever is wrong with the folder, the old weights serve on, bit for bit."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.model_executor.safetensors_source import SafetensorsReader
from fastdeploy.worker.model_runner import ModelRunner
from support.checkpoints import SPECS, config_json, prompt, random_tensors, write_checkpoint, write_safetensors
from support.step_driver import Driver, Sequence, stage, update

SPEC = SPECS["qwen3"]
Q = "model.layers.1.self_attn.q_proj.weight"


def _outputs(runner: ModelRunner) -> list:
    sequences = [Sequence(f"s{n}", prompt(n, 211)) for n in (3, 40)]
    return [s.trace for s in Driver(runner).generate(sequences, 6)]


def _write(folder: Path, edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, seed: int = 99) -> Path:
    spec = replace(SPEC, seed=seed, shards=1)
    tensors = random_tensors(spec)
    edit(tensors)
    return write_checkpoint(folder, spec, tensors)


def _single(folder: Path) -> Path:
    return folder / "model.safetensors"


def _missing(folder: Path) -> str:
    _write(folder, lambda t: t.pop(Q))
    return Q


def _surplus(folder: Path) -> str:
    _write(folder, lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(64, np.float32)}))
    return "model.layers.2.input_layernorm.weight"


def _wrong_shape(folder: Path) -> str:
    _write(folder, lambda t: t.update({Q: t[Q][:-1]}))
    return Q


def _transposed(folder: Path) -> str:
    down = "model.layers.0.mlp.down_proj.weight"
    _write(folder, lambda t: t.update({down: t[down].T}))
    return down


def _wrong_dtype(folder: Path) -> str:
    _write(folder, lambda t: t.update({Q: t[Q].astype(np.int8)}))
    return Q


def _truncated(folder: Path) -> str:
    _write(folder)
    data = _single(folder).read_bytes()
    _single(folder).write_bytes(data[:-5])
    return "model.safetensors"


def _trailing_bytes(folder: Path) -> str:
    _write(folder)
    with open(_single(folder), "ab") as file:
        file.write(b"tail")
    return "model.safetensors"


def _empty_file(folder: Path) -> str:
    _write(folder)
    _single(folder).write_bytes(b"")
    return "model.safetensors"


def _broken_header(folder: Path) -> str:
    _write(folder)
    data = bytearray(_single(folder).read_bytes())
    data[8:12] = b"}{}{"
    _single(folder).write_bytes(data)
    return "model.safetensors"


def _header_too_long(folder: Path) -> str:
    _write(folder)
    data = bytearray(_single(folder).read_bytes())
    data[:8] = (1 << 60).to_bytes(8, "little")
    _single(folder).write_bytes(data)
    return "model.safetensors"


def _offsets_that_do_not_fit(folder: Path) -> str:
    _write(folder)
    data = _single(folder).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[Q]["data_offsets"][1] -= 4
    text = json.dumps(header).encode().ljust(length)
    _single(folder).write_bytes(data[:8] + text + data[8 + length :])
    return Q


def _pickle_only(folder: Path) -> str:
    _write(folder)
    _single(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    return "has neither"


def _shard_gone(folder: Path) -> str:
    write_checkpoint(folder, SPEC)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors"


def _index_escapes_the_folder(folder: Path) -> str:
    write_checkpoint(folder, SPEC)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of", "../model-00002-of"))
    return "plain file names"


def _index_points_elsewhere(folder: Path) -> str:
    write_checkpoint(folder, SPEC)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    here = value["weight_map"][Q]
    value["weight_map"][Q] = next(f for f in value["weight_map"].values() if f != here)
    index.write_text(json.dumps(value))
    return Q


def _tensor_in_two_shards(folder: Path) -> str:
    write_checkpoint(folder, SPEC)
    extra = {Q: random_tensors(SPEC)[Q], "model.norm.weight": random_tensors(SPEC)["model.norm.weight"]}
    write_safetensors(folder / "model-00004.safetensors", extra)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = "model-00004.safetensors"
    index.write_text(json.dumps(value))
    return "model-00004.safetensors"


def _no_folder(folder: Path) -> str:
    return f"{str(folder)!r} cannot be opened as a folder"


def _no_config(folder: Path) -> str:
    _write(folder)
    (folder / "config.json").unlink()
    return "config.json"


def _other_depth(folder: Path) -> str:
    write_checkpoint(folder, replace(SPEC, layers=3))
    return "num_hidden_layers"


def _other_rope(folder: Path) -> str:
    write_checkpoint(folder, replace(SPEC, extra={"rope_theta": 123.0}))
    return "rope_theta"


def _other_architecture(folder: Path) -> str:
    write_checkpoint(folder, SPECS["qwen2"])
    return "architecture"


def _quantised(folder: Path) -> str:
    _write(folder)
    (folder / "config.json").write_text(json.dumps(config_json(SPEC) | {"quantization_config": {"bits": 4}}))
    return "quantization_config"


DAMAGE = [
    _missing,
    _surplus,
    _wrong_shape,
    _transposed,
    _wrong_dtype,
    _truncated,
    _trailing_bytes,
    _empty_file,
    _broken_header,
    _header_too_long,
    _offsets_that_do_not_fit,
    _pickle_only,
    _shard_gone,
    _index_escapes_the_folder,
    _index_points_elsewhere,
    _tensor_in_two_shards,
    _no_folder,
    _no_config,
    _other_depth,
    _other_rope,
    _other_architecture,
    _quantised,
]


def test_every_kind_of_damage_is_refused_by_name_and_changes_nothing(make_runner, tmp_path):
    runner = make_runner("qwen3")
    before, weights = _outputs(runner), runner.weights
    for damage in DAMAGE:
        folder = tmp_path / damage.__name__
        named = damage(folder)
        with pytest.raises(WeightUpdateRefused) as error:
            stage(runner, folder)
        assert named in error.value.message, damage.__name__
        assert runner.weights is weights, damage.__name__
    assert _outputs(runner) == before


def test_a_file_that_shrinks_while_it_is_read_is_refused(make_runner, tmp_path, monkeypatch):
    runner = make_runner("qwen3")
    before = _outputs(runner)
    folder = _write(tmp_path / "shrinks")
    read = SafetensorsReader.read

    def shrink_then_read(reader, name, checksum=None):
        with open(_single(folder), "r+b") as file:
            file.truncate(2000)
        return read(reader, name, checksum)

    monkeypatch.setattr(SafetensorsReader, "read", shrink_then_read)
    with pytest.raises(WeightUpdateRefused, match="cut short"):
        stage(runner, folder)
    assert _outputs(runner) == before


def test_staging_alone_changes_nothing_and_commit_equals_a_start_on_the_new_folder(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    before, fresh = _outputs(runner), _outputs(make_runner(folder))
    staged = stage(runner, folder)
    assert _outputs(runner) == before != fresh
    runner.commit(staged)
    assert _outputs(runner) == fresh


def test_the_folder_may_be_deleted_as_soon_as_stage_returns(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    fresh = _outputs(make_runner(folder))
    staged = stage(runner, folder)
    for file in folder.iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)  # a lazy mapping would now read zeros
    shutil.rmtree(folder)
    runner.commit(staged)
    assert _outputs(runner) == fresh


def test_stage_runs_beside_steps(make_runner, tmp_path):
    runner, folder = make_runner("qwen3"), _write(tmp_path / "new")
    before, fresh, staged = _outputs(runner), _outputs(make_runner(folder)), []
    thread = threading.Thread(target=lambda: staged.append(stage(runner, folder)))
    thread.start()
    during = [_outputs(runner)]
    while thread.is_alive():
        during.append(_outputs(runner))
    thread.join()
    assert all(outputs == before for outputs in during)
    runner.commit(staged[0])
    assert _outputs(runner) == fresh


def test_keys_and_values_of_broken_weights_do_not_outlive_them(make_runner, tmp_path):
    runner = make_runner("qwen3")
    before, good = _outputs(runner), stage(runner, write_checkpoint(tmp_path / "good", SPEC))
    name = "model.layers.0.self_attn.v_proj.weight"  # finite, as it must be, but its sums are not
    broken = _write(tmp_path / "huge", lambda t: t.update({name: np.sign(t[name]) * np.float32(3e38)}))
    update(runner, broken)
    _outputs(runner)  # fills the blocks with infinities
    runner.commit(good)
    assert _outputs(runner) == before
