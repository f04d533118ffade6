"""Random checkpoints, and slightly changed copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from benchmarks.lib.tensors import RandomTensor, float32_tensors, perturbed_copy, to_bfloat16, write_random_tensors

TENSORS = [RandomTensor("a", (3, 500), 0.0, 0.1), RandomTensor("b.weight", (1000,), 1.0, 0.01)]


def test_the_file_is_read_by_safetensors_and_the_seed_fixes_every_byte(tmp_path: Path):
    paths = [tmp_path / name for name in ("x", "y", "z")]
    counts = [write_random_tensors(path, TENSORS, seed) for path, seed in zip(paths, (0, 0, 1), strict=True)]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    assert counts == [2500] * 3
    with safe_open(str(paths[0]), "numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    assert {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in found.items()} == {
        tensor.name: (tensor.shape, "BF16") for tensor in TENSORS
    }


def test_the_values_have_the_mean_and_the_deviation_of_the_tensor(tmp_path: Path):
    write_random_tensors(tmp_path / "model.safetensors", TENSORS, 0)
    for tensor in TENSORS:
        part = float32_tensors(tmp_path)[tensor.name]
        assert part.shape == tensor.shape and abs(part.mean() - tensor.mean) < tensor.std / 5
        assert 0.9 * tensor.std < part.std() < 1.1 * tensor.std


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159265, 0.0], np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, -3.140625, 0.0]


def test_every_weight_of_a_copy_moves_a_little_and_the_source_stays(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    weights = {"a": np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8), "b": np.ones(5, np.float32)}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    perturbed_copy(source, tmp_path / "target", 0.01)
    after = load_file(tmp_path / "target" / "model.safetensors")
    assert (tmp_path / "target" / "config.json").read_text() == "{}"
    for name, old in weights.items():
        assert np.array_equal(load_file(source / "model.safetensors")[name], old)
        assert not np.array_equal(after[name], old) and np.abs(after[name] / old - 1).max() < 0.06


def test_a_copy_of_bfloat16_stays_bfloat16(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    write_random_tensors(source / "model.safetensors", [RandomTensor("w", (50, 28), 0.0, 0.05)], 0)
    perturbed_copy(source, tmp_path / "target", 0.05)
    ratio = float32_tensors(tmp_path / "target")["w"] / float32_tensors(source)["w"] - 1
    assert ratio.std() == pytest.approx(0.05, rel=0.1) and abs(ratio.mean()) < 0.01
