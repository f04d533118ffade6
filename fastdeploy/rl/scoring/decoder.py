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
from fastdeploy.model_executor.ops.interface import Activation, AttentionBlock, AttentionSpec, DecoderLayer, MlpBlock
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


class _Constants(NamedTuple):
    """The constants of a layer. cos, sin: of the rotary embedding, float32 [max_model_len, head_dim]."""

    attention: AttentionSpec
    activation: Activation
    cos: paddle.Tensor
    sin: paddle.Tensor


def _constants_of(layers: Iterable[DecoderLayer]) -> list[_Constants]:
    """Return the constants of each layer. Layers with the same rotary embedding share its tables, which are large."""
    found: list[_Constants] = []
    tables: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
    for layer in layers:
        [spec] = [block.attention for block in layer.blocks if isinstance(block, AttentionBlock)]
        [activation] = [block.activation for block in layer.blocks if isinstance(block, MlpBlock)]
        if id(spec.rope_cos) not in tables:
            first, second = _rotated_pairs(spec)
            pairs = paddle.to_tensor(np.argsort(np.concatenate([first, second])) % len(first))  # of each dimension
            cos, sin = (paddle.index_select(table, pairs, axis=1) for table in (spec.rope_cos, spec.rope_sin))
            rest = [0, spec.head_dim - spec.rotated]  # dimensions that are not rotated
            tables[id(spec.rope_cos)] = F.pad(cos, rest, value=1.0), F.pad(sin, rest)
        found.append(_Constants(spec, activation, *tables[id(spec.rope_cos)]))
    return found


class Decoder:
    """The computation of a model. weights: any set of its weights, for the constants of its layers."""

    def __init__(self, model: Model, weights: ModelWeights):
        self._config, self._embedding_scale = model.config, model.embedding_scale
        self._layers = _constants_of(weights.layers)
        spec = self._layers[0].attention  # the heads, and the pairs that are rotated, are those of all layers
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        # x @ quarter_turn turns each pair (a, b) into (-b, a): faster with gradients than split and concat.
        first, second = _rotated_pairs(spec)
        turn = np.zeros((self._head_dim, self._head_dim), np.float32)
        turn[second, first], turn[first, second] = -1, 1
        self._quarter_turn = paddle.to_tensor(turn)

    def hidden(self, leaves: Mapping[str, Leaf], ids: paddle.Tensor) -> paddle.Tensor:
        """Return the hidden states before the last norm: ids int64 [B, T] -> [B * T, hidden_size]. leaves: by key of
        the parameter."""
        batch, length = ids.shape
        x = F.embedding(ids.flatten(), leaves["embedding"].weight)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        masks = {window: self._mask(length, window) for window in {one.attention.window for one in self._layers}}
        for layer, constants in enumerate(self._layers):
            of = {key.removeprefix(f"layers.{layer}."): leaf for key, leaf in leaves.items()}
            mask = masks[constants.attention.window]
            out = self._attention(of, constants, self._norm(x, of["input_norm"]), batch, length, mask)
            x = x + self._added(out, of, "attention_out_norm")
            gate_up = _linear(self._norm(x, of["post_norm"]), of["gate_up"])
            out = _linear(_gated(gate_up, constants.activation), of["down"])
            x = x + self._added(out, of, "mlp_out_norm")
        return x

    def _added(self, out: paddle.Tensor, of: Mapping[str, Leaf], norm: str) -> paddle.Tensor:
        """Return what a block with this result adds to the residual."""
        return self._norm(out, of[norm]) if norm in of else out

    def logits(self, leaves: Mapping[str, Leaf], hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the logits [N, vocab_size] of hidden states [N, hidden_size]."""
        head = leaves.get("lm_head", leaves["embedding"])
        return _linear(self._norm(hidden, leaves["norm"]), head)

    def _norm(self, x: paddle.Tensor, leaf: Leaf) -> paddle.Tensor:
        """Return the RMSNorm over the last axis of x [N, size]."""
        scale = paddle.rsqrt((x * x).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return x * scale * _rows(self._norm_weight(leaf), x.shape[0])

    def _norm_weight(self, leaf: Leaf) -> paddle.Tensor:
        """See ``interface.norm_weight``."""
        return leaf.weight + 1.0 if self._config.norms_add_one else leaf.weight

    def _mask(self, length: int, window: int) -> paddle.Tensor:
        """Return 0 for keys that a query attends to and -1e9 for others, [groups * T, T]. window: see
        ``AttentionSpec``."""
        groups = self._heads // self._kv_heads
        allowed = np.tril(np.ones((length, length), np.float32))
        if window:
            allowed = np.triu(allowed, 1 - window)
        return paddle.to_tensor(np.tile((allowed - 1) * np.float32(1e9), (groups, 1)))

    def _attention(
        self,
        of: Mapping[str, Leaf],
        constants: _Constants,
        x: paddle.Tensor,
        batch: int,
        length: int,
        mask: paddle.Tensor,
    ) -> paddle.Tensor:
        heads, kv, dim = self._heads, self._kv_heads, self._head_dim
        qkv = _linear(x, of["qkv"]).reshape([batch, length, heads + 2 * kv, dim]).transpose([0, 2, 1, 3])
        qk, v = paddle.split(qkv, [heads + kv, kv], axis=1)
        if "q_norm" in of:
            of_heads = [self._norm_weight(of["q_norm"])] * heads + [self._norm_weight(of["k_norm"])] * kv
            qk = self._head_norm(qk, paddle.stack(of_heads))
        cos, sin = constants.cos[:length], constants.sin[:length]
        qk = qk * cos + paddle.matmul(qk, self._quarter_turn) * sin
        q, k = paddle.split(qk, [heads, kv], axis=1)
        q = q.reshape([batch, kv, heads // kv * length, dim]) * constants.attention.scale
        weights = F.softmax(paddle.matmul(q, k, transpose_y=True) + mask, -1)
        out = paddle.matmul(weights, v).reshape([batch, heads, length, dim]).transpose([0, 2, 1, 3])
        return _linear(out.reshape([batch * length, heads * dim]), of["o"])

    def _head_norm(self, x: paddle.Tensor, weights: paddle.Tensor) -> paddle.Tensor:
        """Return the RMSNorm of each head: x [B, heads, T, head_dim], weights [heads, head_dim]."""
        batch, heads, length, dim = x.shape
        scale = paddle.rsqrt((x * x).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        rows = _rows(weights.flatten(), batch * length).reshape([batch, length, heads, dim]).transpose([0, 2, 1, 3])
        return x * scale * rows


def _rotated_pairs(spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the two dimensions of each pair that the rotary embedding rotates, each int64 [rotated // 2]."""
    half = np.arange(spec.rotated // 2)
    return (2 * half, 2 * half + 1) if spec.interleaved else (half, half + len(half))


def _gated(gate_up: paddle.Tensor, activation: Activation) -> paddle.Tensor:
    """Return activation(gate) * up: gate_up [N, 2I] -> [N, I]."""
    if activation is Activation.SILU:
        return F.swiglu(gate_up)
    gate, up = paddle.split(gate_up, 2, axis=1)
    return F.gelu(gate, approximate=True) * up


def _linear(x: paddle.Tensor, leaf: Leaf) -> paddle.Tensor:
    y = paddle.matmul(x, leaf.weight, transpose_y=True)
    return y if leaf.bias is None else y + _rows(leaf.bias, y.shape[0])


def _rows(vector: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return a vector [size] as ``count`` equal rows. The gradient of an outer product is a matrix product, ten times
    faster on a CPU than the sum over rows that is the gradient of a broadcast."""
    return paddle.matmul(paddle.ones([count, 1]), vector.unsqueeze(0))
