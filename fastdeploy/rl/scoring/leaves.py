"""The values of a model's parameters as Paddle tensors that collect gradients, in float32.

``Model.assemble`` makes the same blocks of them as of packed values. So whatever parameters a model file names, the
decoder of this package computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import paddle

from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.parameters import Parameter, Value


@dataclass  # not frozen: a protocol with plain attributes has no read-only implementer
class Leaf:
    """A linear in place of a packed one: weight [out_features, in_features], bias [out_features] or None."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None
    out_features: int
    in_features: int
    nbytes: int
    quantized: bool = False

    def transposed_heads(self, heads: int, rows: int) -> Leaf:
        """See ``PackedLinear.transposed_heads``."""
        of_heads = self.weight.reshape([heads, -1, self.in_features])[:, :rows].transpose([0, 2, 1])
        weight = of_heads.reshape([heads * self.in_features, rows])
        return Leaf(weight, None, heads * self.in_features, rows, 4 * weight.size)


def as_leaf(linear: PackedLinear) -> Leaf:
    """Return a linear of a block that was assembled of leaves."""
    assert isinstance(linear, Leaf)
    return linear


def leaf_of(parameter: Parameter, tensors: Mapping[str, paddle.Tensor]) -> Value:
    """Stack the tensors of a parameter, by name and in any dtype, into a leaf, or a vector, that collects gradients."""
    if parameter.is_vector:
        return _stacked([tensors[parameter.weights[0]].flatten()])
    if parameter.experts:
        tensors = {name: parameter.rows_of_experts(tensors[name]) for name in parameter.tensors}
    weight = _stacked(tensors[name] for name in parameter.weights)
    bias = _stacked(tensors[name].flatten() for name in parameter.biases) if parameter.biases else None
    out_features, in_features = weight.shape
    return Leaf(weight, bias, out_features, in_features, 4 * out_features * in_features)


def _stacked(tensors: Iterable[paddle.Tensor]) -> paddle.Tensor:
    parts = [tensor.detach().astype("float32") for tensor in tensors]
    stacked = paddle.concat(parts) if len(parts) > 1 else parts[0].clone()
    stacked.stop_gradient = False
    return stacked


def gradients_of(parameter: Parameter, value: Value) -> dict[str, paddle.Tensor]:
    """Return the collected gradient of each tensor of a parameter, by name: zeros if no result depends on it, as on the
    bias of a router."""
    if isinstance(value, paddle.Tensor):
        [(name, shape)] = parameter.shapes.items()
        return {name: _gradient(value).reshape(shape)}
    leaf, rows = as_leaf(value), list(parameter.rows)
    found = dict(zip(parameter.weights, paddle.split(_gradient(leaf.weight), rows), strict=True))
    if leaf.bias is not None:
        found |= zip(parameter.biases, paddle.split(_gradient(leaf.bias), rows), strict=True)
    if parameter.experts:
        return {name: parameter.tensor_of_experts(one).reshape(parameter.shapes[name]) for name, one in found.items()}
    return found


def _gradient(tensor: paddle.Tensor) -> paddle.Tensor:
    return paddle.zeros_like(tensor) if tensor.grad is None else tensor.grad
