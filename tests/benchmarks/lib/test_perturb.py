from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.lib.tensors import RandomTensor, perturbed_copy, write_random_tensors


def test_every_weight_moves_a_little_and_the_source_stays(tmp_path: Path):
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
        assert not np.array_equal(after[name], old)
        assert np.abs(after[name] / old - 1).max() < 0.06


def test_bfloat16_stays_bfloat16(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    write_random_tensors(source / "model.safetensors", [RandomTensor("w", (50, 28), 0.0, 0.05)], 0)
    perturbed_copy(source, tmp_path / "target", 0.05)
    old, new = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("source", "target"))
    head = 8 + int.from_bytes(old[:8], "little")
    assert old[:head] == new[:head] and len(old) == len(new)
    values = [(np.frombuffer(raw[head:], np.uint16).astype(np.uint32) << 16).view(np.float32) for raw in (old, new)]
    assert np.isfinite(values[1]).all()
    ratio = values[1] / values[0] - 1
    assert ratio.std() == pytest.approx(0.05, rel=0.1) and abs(ratio.mean()) < 0.01
