from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from benchmarks.lib.tensors import RandomTensor, to_bfloat16, write_random_tensors

TENSORS = [RandomTensor("a", (3, 500), 0.0, 0.1), RandomTensor("b.weight", (1000,), 1.0, 0.01)]


def test_the_file_is_read_by_safetensors_and_the_seed_fixes_every_byte(tmp_path: Path):
    paths = [tmp_path / name for name in ("x", "y", "z")]
    counts = [write_random_tensors(path, TENSORS, seed) for path, seed in zip(paths, (0, 0, 1), strict=True)]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    assert counts == [2500] * 3
    with safe_open(str(paths[0]), "numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            tensor.name: tensor.shape for tensor in TENSORS
        }
        assert {file.get_slice(tensor.name).get_dtype() for tensor in TENSORS} == {"BF16"}


def test_the_values_have_the_mean_and_the_deviation_of_the_tensor(tmp_path: Path):
    write_random_tensors(tmp_path / "x", TENSORS, 0)
    data = np.frombuffer((tmp_path / "x").read_bytes()[-2 * 2500 :], "<u2").astype(np.uint32) << 16
    values = data.view(np.float32)
    for part, tensor in ((values[:1500], TENSORS[0]), (values[1500:], TENSORS[1])):
        assert abs(part.mean() - tensor.mean) < tensor.std / 5
        assert 0.9 * tensor.std < part.std() < 1.1 * tensor.std


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159265, 0.0], np.float32)
    bits = to_bfloat16(values)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, -3.140625, 0.0]
