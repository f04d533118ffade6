"""Packing of checkpoint tensors into the parameters of a model, and back. All values are in the serving dtype: a
float32 tensor is rounded to nearest even for a bfloat16 engine, and checksums are those of the rounded values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import paddle

from fastdeploy.core.serving_dtype import dtype_of, in_dtype
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.interface import Ops

Value: TypeAlias = PackedLinear | paddle.Tensor
Array = TypeVar("Array", np.ndarray, paddle.Tensor)
SLICE = 4096  # rows that are rounded or unpacked at once: a whole copy of a tensor could be large


class Use(Enum):
    """The forms in which a linear may be used beside its own values. ADAPTED: with adapters, and as int8 values.
    QUANTIZED: as int8 values. EXACT: neither."""

    ADAPTED = "adapted"
    QUANTIZED = "quantized"
    EXACT = "exact"


class Parameter(NamedTuple):
    """One packed object that the model uses, and the checkpoint tensors that it contains.

    A linear stacks ``weights`` [rows[i], columns] along the output (a fused projection has several); ``biases`` has one
    name for each weight, or none. A vector (the weight of a norm) is one tensor [columns] and has no ``rows``; with
    ``is_row`` a checkpoint has it as [1, columns]. use: of a linear.

    experts: 0, or the linear is that of so many experts, and one weight has all of them: the tensor [experts, columns,
    rows / experts], each matrix transposed, and the bias [experts, rows / experts]. interleaved: see ``Region``.
    """

    key: str
    weights: tuple[str, ...]
    columns: int
    rows: tuple[int, ...] = ()
    biases: tuple[str, ...] = ()
    use: Use = Use.ADAPTED
    is_row: bool = False
    experts: int = 0
    interleaved: bool = False

    @property
    def is_vector(self) -> bool:
        return not self.rows

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.weights, *self.biases)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        if self.is_vector:
            return {self.weights[0]: (1, self.columns) if self.is_row else (self.columns,)}
        if self.experts:
            of_expert = self.rows[0] // self.experts
            shapes = (self.experts, self.columns, of_expert), (self.experts, of_expert)
            return dict(zip(self.tensors, shapes, strict=bool(self.biases)))
        weights = {name: (rows, self.columns) for name, rows in zip(self.weights, self.rows, strict=True)}
        return weights | {name: (rows,) for name, rows in zip(self.biases, self.rows, strict=bool(self.biases))}

    def rows_of_experts(self, tensor: Array) -> Array:
        """Return the rows of the linear, [rows, columns], that a tensor of experts [experts, columns, rows / experts]
        has; of a bias, [rows, 1]."""
        columns, parts = tensor.shape[1] if len(tensor.shape) == 3 else 1, 1 + self.interleaved
        return tensor.reshape([self.experts, columns, -1, parts]).transpose([0, 3, 2, 1]).reshape([-1, columns])

    def tensor_of_experts(self, rows: Array) -> Array:
        """Return rows of whole experts, [N, columns], as a tensor has them: [experts, columns, rows of an expert]. A
        bias, [N], has one column."""
        columns, parts = rows.shape[1] if len(rows.shape) == 2 else 1, 1 + self.interleaved
        of_expert = self.rows[0] // self.experts
        parted = rows.reshape([-1, parts, of_expert // parts, columns]).transpose([0, 3, 2, 1])
        return parted.reshape([-1, columns, of_expert])


def vector(key: str, name: str, size: int, is_row: bool = False) -> Parameter:
    """Return the parameter of one vector: the tensor ``name``, [size], or [1, size] with ``is_row``."""
    return Parameter(key, (name,), size, is_row=is_row)


def linear(
    key: str, projections: Mapping[str, int], columns: int, bias: bool = False, use: Use = Use.ADAPTED
) -> Parameter:
    """Return the parameter of a linear. projections: name and output size of each projection that it stacks, in order;
    the tensors are NAME.weight [size, columns] and, with ``bias``, NAME.bias [size]."""
    biases = tuple(f"{name}.bias" for name in projections) if bias else ()
    weights, rows = tuple(f"{name}.weight" for name in projections), tuple(projections.values())
    return Parameter(key, weights, columns, rows, biases, use)


def experts_linear(
    key: str, names: tuple[str, str], experts: int, rows: int, columns: int, interleaved: bool = False
) -> Parameter:
    """Return the parameter of a linear of experts whose tensors have all experts. names: of its weight [experts,
    columns, rows] and of its bias [experts, rows]. interleaved: see ``Region``."""
    found = Parameter(key, names[:1], columns, (experts * rows,), names[1:], Use.QUANTIZED)
    return found._replace(experts=experts, interleaved=interleaved)


def as_vector(value: Value) -> paddle.Tensor:
    """Return a packed value, which must be a vector."""
    assert isinstance(value, paddle.Tensor)
    return value


def as_linear(value: Value) -> PackedLinear:
    """Return a packed value, which must be a linear."""
    assert not isinstance(value, paddle.Tensor)
    return value


def unpack(ops: Ops, parameter: Parameter, value: Value, name: str) -> Iterator[np.ndarray]:
    """Yield the tensor ``name`` of a packed parameter in the serving dtype, in slices of rows."""
    if isinstance(value, paddle.Tensor):
        yield in_dtype(value.numpy(), dtype_of(name, ops.dtype))
        return
    names = parameter.biases if name in parameter.biases else parameter.weights
    index = names.index(name)
    first = sum(parameter.rows[:index])
    last = first + parameter.rows[index]
    if names is parameter.biases:
        bias = ops.unpack_bias(value)
        assert bias is not None
        if parameter.experts:
            bias = parameter.tensor_of_experts(bias).reshape(-1)
        yield in_dtype(bias[first:last], ops.dtype)
        return
    if parameter.experts:
        of_expert = last // parameter.experts
        for row in range(0, last, of_expert):
            yield parameter.tensor_of_experts(ops.unpack_linear(value, row, row + of_expert))
        return
    for row in range(first, last, SLICE):
        yield ops.unpack_linear(value, row, min(row + SLICE, last))


def digest(slices: Iterable[np.ndarray]) -> str:
    """Return the sha256, in hexadecimal, of the bytes of the slices."""
    sha = hashlib.sha256()
    for piece in slices:
        sha.update(as_bytes(np.ascontiguousarray(piece)))
    return sha.hexdigest()


def as_bytes(array: np.ndarray) -> memoryview:
    """Return a view of the bytes of a contiguous array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


def checksums(ops: Ops, parameters: Iterable[Parameter], values: Mapping[str, Value]) -> dict[str, str]:
    """Return the sha256, in hexadecimal, of every checkpoint tensor in the serving dtype, by name."""
    return {
        name: digest(unpack(ops, parameter, values[parameter.key], name))
        for parameter in parameters
        for name in parameter.tensors
    }
