"""The decoder of ``models/decoder.py`` in plain Paddle, with gradients, in float32.

A projection of the engine stacks several tensors (q, k and v; gate and up), and so does a ``Leaf`` here: one product
instead of three. Rows of padding may hold anything: they lie behind the tokens of their sequence, and attention is
causal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import AttentionBlock, AttentionSpec
from fastdeploy.model_executor.parameters import Parameter


class Leaf(NamedTuple):
    """The value of a Parameter in float32. weight: [out_features, in_features], or [size] of a vector."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None


def leaf_of(parameter: Parameter, tensors: Mapping[str, paddle.Tensor]) -> Leaf:
    """Stack the tensors of a parameter, by name and in any dtype, into a leaf that collects gradients."""
    weight, bias = (_stacked(tensors[name] for name in names) for names in (parameter.weights, parameter.biases))
    assert weight is not None
    return Leaf(weight, bias)


def _stacked(tensors: Iterable[paddle.Tensor]) -> paddle.Tensor | None:
    parts = [tensor.detach().astype("float32") for tensor in tensors]
    if not parts:
        return None
    stacked = paddle.concat(parts) if len(parts) > 1 else parts[0].clone()
    stacked.stop_gradient = False
    return stacked


def gradients_of(parameter: Parameter, leaf: Leaf) -> dict[str, paddle.Tensor]:
    """Return the collected gradient of each tensor of a parameter, by name. The leaf must have one."""
    weight = _gradient(leaf.weight)
    if parameter.is_vector:
        return {parameter.weights[0]: weight}
    rows = list(parameter.rows)
    found = dict(zip(parameter.weights, paddle.split(weight, rows), strict=True))
    if leaf.bias is not None:
        found |= zip(parameter.biases, paddle.split(_gradient(leaf.bias), rows), strict=True)
    return found


def _gradient(tensor: paddle.Tensor) -> paddle.Tensor:
    assert tensor.grad is not None
    return tensor.grad


class Decoder:
    """The computation of a model. weights: any set of its weights, for the constants of its attention."""

    def __init__(self, model: Model, weights: ModelWeights):
        blocks = weights.layers[0].blocks  # all layers have the same constants
        spec = next(block.attention for block in blocks if isinstance(block, AttentionBlock))
        self._config, self._spec = model.config, spec
        first, second = _rotated_pairs(spec)
        pairs = paddle.to_tensor(np.argsort(np.concatenate([first, second])) % len(first))  # of each dimension
        self._cos = paddle.index_select(spec.rope_cos, pairs, axis=1)  # [max_model_len, head_dim]
        self._sin = paddle.index_select(spec.rope_sin, pairs, axis=1)
        # x @ quarter_turn turns each pair (a, b) into (-b, a): faster with gradients than split and concat.
        turn = np.zeros((spec.head_dim, spec.head_dim), np.float32)
        turn[second, first], turn[first, second] = -1, 1
        self._quarter_turn = paddle.to_tensor(turn)

    def hidden(self, leaves: Mapping[str, Leaf], ids: paddle.Tensor) -> paddle.Tensor:
        """Return the hidden states before the last norm: ids int64 [B, T] -> [B * T, hidden_size]. leaves: by key of
        the parameter."""
        batch, length = ids.shape
        x = F.embedding(ids.flatten(), leaves["embedding"].weight)
        mask = self._mask(length)
        for layer in range(self._config.num_hidden_layers):
            of = {key.removeprefix(f"layers.{layer}."): leaf for key, leaf in leaves.items()}
            x = x + self._attention(of, self._norm(x, of["input_norm"]), batch, length, mask)
            gate_up = _linear(self._norm(x, of["post_norm"]), of["gate_up"])
            x = x + _linear(F.swiglu(gate_up), of["down"])
        return x

    def logits(self, leaves: Mapping[str, Leaf], hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the logits [N, vocab_size] of hidden states [N, hidden_size]."""
        head = leaves.get("lm_head", leaves["embedding"])
        return _linear(self._norm(hidden, leaves["norm"]), head)

    def _norm(self, x: paddle.Tensor, leaf: Leaf) -> paddle.Tensor:
        """Return the RMSNorm over the last axis of x [N, size]."""
        scale = paddle.rsqrt((x * x).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return x * scale * _rows(leaf.weight, x.shape[0])

    def _mask(self, length: int) -> paddle.Tensor:
        """Return 0 for keys that a query attends to and -1e9 for others, [groups * T, T]."""
        groups = self._spec.num_heads // self._spec.num_kv_heads
        allowed = np.tril(np.ones((length, length), np.float32))
        return paddle.to_tensor(np.tile((allowed - 1) * np.float32(1e9), (groups, 1)))

    def _attention(
        self, of: Mapping[str, Leaf], x: paddle.Tensor, batch: int, length: int, mask: paddle.Tensor
    ) -> paddle.Tensor:
        spec = self._spec
        heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = _linear(x, of["qkv"]).reshape([batch, length, heads + 2 * kv, dim]).transpose([0, 2, 1, 3])
        qk, v = paddle.split(qkv, [heads + kv, kv], axis=1)
        if "q_norm" in of:
            of_heads = [of["q_norm"].weight] * heads + [of["k_norm"].weight] * kv
            qk = self._head_norm(qk, paddle.stack(of_heads))
        qk = qk * self._cos[:length] + paddle.matmul(qk, self._quarter_turn) * self._sin[:length]
        q, k = paddle.split(qk, [heads, kv], axis=1)
        q = q.reshape([batch, kv, heads // kv * length, dim]) * spec.scale
        weights = F.softmax(paddle.matmul(q, k, transpose_y=True) + mask, -1)
        out = paddle.matmul(weights, v).reshape([batch, heads, length, dim]).transpose([0, 2, 1, 3])
        return _linear(out.reshape([batch * length, heads * dim]), of["o"])

    def _head_norm(self, x: paddle.Tensor, weights: paddle.Tensor) -> paddle.Tensor:
        """Return the RMSNorm of each head: x [B, heads, T, head_dim], weights [heads, head_dim]."""
        batch, heads, length, dim = x.shape
        scale = paddle.rsqrt((x * x).mean(-1, keepdim=True) + self._spec.norm_eps)
        rows = _rows(weights.flatten(), batch * length).reshape([batch, length, heads, dim]).transpose([0, 2, 1, 3])
        return x * scale * rows


def _rotated_pairs(spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the two dimensions of each pair that the rotary embedding rotates, each int64 [head_dim // 2]."""
    half = np.arange(spec.head_dim // 2)
    return (2 * half, 2 * half + 1) if spec.interleaved else (half, half + len(half))


def _linear(x: paddle.Tensor, leaf: Leaf) -> paddle.Tensor:
    y = paddle.matmul(x, leaf.weight, transpose_y=True)
    return y if leaf.bias is None else y + _rows(leaf.bias, y.shape[0])


def _rows(vector: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return a vector [size] as ``count`` equal rows. The gradient of an outer product is a matrix product, ten times
    faster on a CPU than the sum over rows that is the gradient of a broadcast."""
    return paddle.matmul(paddle.ones([count, 1]), vector.unsqueeze(0))
