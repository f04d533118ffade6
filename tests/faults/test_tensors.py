"""Tensors are wrong in the way that the fault says, and all others are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FileSource, FolderSource
from fastdeploy.faults.rules import read_rule
from fastdeploy.faults.tensors import Tensor, changed, encode, names_of, parse, read_source

MATRIX = np.arange(6, dtype="<f4").reshape(2, 3)
GIVEN = {
    "layers.0.mlp.experts.0.up": Tensor("F32", (2, 3), MATRIX.tobytes()),
    "norm": Tensor("BF16", (2,), np.array([0x3F80, 0x4000], dtype="<u2").tobytes()),  # 1, 2
}
EXPERT, NORM = GIVEN


def wrong(fault: str, served=None, number: int = 0, **fields):
    return changed(GIVEN, read_rule({"fault": fault, **fields}, is_fleet=False), number, served or {})


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode(GIVEN))
    assert read_source(FolderSource(str(tmp_path))) == read_source(FileSource(str(path))) == GIVEN
    path.write_bytes(b"\0" * 20)
    assert names_of(FileSource(str(path))) == []
    with pytest.raises(InvalidField, match="no fault can be put into it"):
        read_source(FileSource(str(path)))


def test_so_many_bits_differ_always_the_same_ones():
    def differing(data: bytes, other: bytes) -> int:
        return sum((a ^ b).bit_count() for a, b in zip(data, other, strict=True))

    first = wrong("bits_flipped", bits=5)
    assert {name: differing(GIVEN[name].data, first[name].data) for name in GIVEN} == {EXPERT: 5, NORM: 5}
    assert first == wrong("bits_flipped", bits=5)
    assert first != wrong("bits_flipped", bits=5, seed=1)
    assert first != wrong("bits_flipped", bits=5, number=1)


def test_a_transposed_matrix_keeps_its_shape_and_a_vector_its_values():
    result = wrong("tensors_transposed")
    assert result[EXPERT] == Tensor("F32", (2, 3), MATRIX.T.copy().tobytes())
    assert result[NORM] == GIVEN[NORM]


def test_values_are_scaled_in_their_own_type():
    result = wrong("tensors_scaled", factor=1.5)
    assert np.frombuffer(result[EXPERT].data, "<f4").tolist() == (MATRIX * 1.5).ravel().tolist()
    assert np.frombuffer(result[NORM].data, "<u2").tolist() == [0x3FC0, 0x4040]  # 1.5, 3


def test_stale_tensors_have_the_values_that_serve_in_their_own_type():
    served = {
        EXPERT: Tensor("F32", (2, 3), (MATRIX + 9).tobytes()),
        NORM: Tensor("F32", (2,), np.array([3, 4], dtype="<f4").tobytes()),
    }
    assert wrong("tensors_stale", served, tensors="*.experts.*") == {EXPERT: served[EXPERT], NORM: GIVEN[NORM]}
    assert wrong("chunk_dropped", served)[NORM] == Tensor(
        "BF16", (2,), np.array([0x4040, 0x4080], dtype="<u2").tobytes()
    )


def test_a_tensor_that_serves_in_another_shape_or_not_at_all_stays():
    assert wrong("tensors_stale", {NORM: Tensor("BF16", (1,), b"\0\0")}) == GIVEN


def test_a_file_of_changed_tensors_is_read_again():
    result = wrong("tensors_scaled")
    assert parse(encode(result)) == result
