"""From checkpoint tensors to what the model computes with, and back. All values are in the serving dtype: a float32
tensor sent to a bfloat16 engine is rounded (to nearest even) whatever it is, so that a checksum says what serves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import paddle

from fastdeploy.model_executor.ops.interface import Ops, PackedLinear

Value: TypeAlias = PackedLinear | paddle.Tensor
# The largest tensor that is rounded or unpacked at once has so many rows, so that none is ever copied whole.
SLICE = 4096
# From here on a float32 rounds to an infinity of bfloat16.
BFLOAT16_OVERFLOW = np.array(0x7F7F8000, np.uint32).view(np.float32)


class Parameter(NamedTuple):
    """One object that the model computes with, and the checkpoint tensors it is made of.

    A linear stacks ``weights`` along the output, ``rows`` of each (fused projections have several); ``biases`` has as
    many names or none. A vector (the weight of a norm) is one tensor and has no ``rows``.
    """

    key: str
    weights: tuple[str, ...]
    rows: tuple[int, ...] = ()
    biases: tuple[str, ...] = ()

    @property
    def is_vector(self) -> bool:
        return not self.rows

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.weights, *self.biases)


def pack(ops: Ops, parameter: Parameter, arrays: Mapping[str, np.ndarray]) -> Value:
    """arrays: every tensor of the parameter, float32 or bfloat16 as uint16 bits; not needed afterwards."""
    if parameter.is_vector:
        return paddle.to_tensor(_widen(in_dtype(arrays[parameter.weights[0]], ops.dtype)))
    parts = [arrays[name] for name in parameter.weights]
    if len({part.dtype for part in parts}) > 1:
        parts = [_widen(part) for part in parts]
    biases = [_widen(in_dtype(arrays[name], ops.dtype)) for name in parameter.biases]
    return ops.pack_linear(parts, biases or None)


def unpack(ops: Ops, parameter: Parameter, value: Value, name: str) -> Iterator[np.ndarray]:
    """The tensor ``name`` of the parameter as it serves, in the serving dtype, in slices of rows."""
    if parameter.is_vector:
        yield in_dtype(value.numpy(), ops.dtype)
        return
    names = parameter.biases if name in parameter.biases else parameter.weights
    index = names.index(name)
    first = sum(parameter.rows[:index])
    last = first + parameter.rows[index]
    if names is parameter.biases:
        yield in_dtype(ops.unpack_bias(value)[first:last], ops.dtype)
        return
    for row in range(first, last, SLICE):
        yield ops.unpack_linear(value, row, min(row + SLICE, last))


def unpack_whole(ops: Ops, parameter: Parameter, value: Value, name: str) -> np.ndarray:
    slices = list(unpack(ops, parameter, value, name))
    return slices[0] if len(slices) == 1 else np.concatenate(slices)


def digest(slices: Iterable[np.ndarray]) -> str:
    """sha256 hex of the values, in order."""
    sha = hashlib.sha256()
    for piece in slices:
        sha.update(memoryview(np.ascontiguousarray(piece).reshape(-1)).cast("B"))
    return sha.hexdigest()


def checksums(ops: Ops, parameters: Iterable[Parameter], values: Mapping[str, Value]) -> dict[str, str]:
    """sha256 hex of every checkpoint tensor as it serves."""
    return {
        name: digest(unpack(ops, parameter, values[parameter.key], name))
        for parameter in parameters
        for name in parameter.tensors
    }


def sliced(array: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    """A checkpoint tensor in the serving dtype, in slices of rows."""
    for row in range(0, len(array), SLICE):
        yield in_dtype(array[row : row + SLICE], dtype)


def in_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32, or bfloat16 as uint16 bits, converted to the other if ``dtype`` says so."""
    if dtype == "float32":
        return _widen(array)
    if array.dtype == np.uint16:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def fits(array: np.ndarray, dtype: str) -> bool:
    """Whether finite values stay finite in the serving dtype."""
    if dtype == "float32" or array.dtype == np.uint16 or array.size == 0:
        return True
    return bool(array.max() < BFLOAT16_OVERFLOW and array.min() > -BFLOAT16_OVERFLOW)


def _widen(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
