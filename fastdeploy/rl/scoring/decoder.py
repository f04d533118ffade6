"""The blocks of ``ops/interface.py`` in plain Paddle, with gradients, in float32.

A block is computed from its own fields, whichever architecture made it. Its linears are leaves, and a linear of the
engine stacks several tensors (q, k and v; gate and up): so one product computes all three. Rows of padding may hold
anything: they lie behind the tokens of their sequence, and attention is causal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.blocks import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    AttentionBlock,
    AttentionSpec,
    Block,
    ExpertsBlock,
    LatentAttentionBlock,
    MlpBlock,
    PackedLinear,
    RouterScore,
    RouterSpec,
)
from fastdeploy.rl.scoring.leaves import as_leaf

NO_EXPERT = -1


class Decoder:
    """The computation of a model. Its weights are assembled of leaves."""

    def __init__(self, model: Model):
        self._config, self._embedding_scale = model.config, model.embedding_scale

    def hidden(
        self, weights: ModelWeights, ids: paddle.Tensor, rows: paddle.Tensor, experts: np.ndarray | None = None
    ) -> paddle.Tensor:
        """Return hidden states after the last norm: ids int64 [B, T], and rows, int64 [N], of the flattened ids ->
        [N, hidden_size]. experts: the routing of the flattened ids, int64 [B * T, experts layers, top_k], or NO_EXPERT.
        A model with experts needs the routing of the engine's forward pass: near a tie, the same weights in float32
        may choose other experts."""
        sequences, length = ids.shape
        batch = _Batch(sequences, length, experts)
        x = F.embedding(ids.flatten(), as_leaf(weights.embedding).weight)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        for layer in weights.layers:
            for block in layer.blocks:
                x = x + _added(x, block, batch)
        return _norm(F.embedding(rows, x), weights.norm, self._config.rms_norm_eps)

    def logits(self, weights: ModelWeights, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the logits [N, vocab_size] of rows [N, hidden_size] of ``hidden``."""
        return _linear(hidden, weights.lm_head)


class _Rotation(NamedTuple):
    """The rotary embedding of T positions: x * cos + (x @ quarter_turn) * sin. cos, sin: float32 [T, head_dim].
    quarter_turn: float32 [head_dim, head_dim], turns each pair (a, b) into (-b, a): faster with gradients than split
    and concat."""

    cos: paddle.Tensor
    sin: paddle.Tensor
    quarter_turn: paddle.Tensor


class _Batch:
    """The rows of B sequences of T tokens with their routing, and what layers share that compute them."""

    def __init__(self, sequences: int, length: int, experts: np.ndarray | None):
        self.sequences, self.length, self.experts = sequences, length, experts
        self._masks: dict[tuple[int, int], paddle.Tensor] = {}
        self._rotations: dict[int, _Rotation] = {}

    def mask(self, spec: AttentionSpec) -> paddle.Tensor:
        """Return 0 for keys that a query attends to and -1e9 for others, float32 [heads / kv_heads * T, T]."""
        groups = spec.num_heads // spec.num_kv_heads
        key = (groups, spec.window)
        if key not in self._masks:
            allowed = np.tril(np.ones((self.length, self.length), np.float32))
            if spec.window:
                allowed = np.triu(allowed, 1 - spec.window)
            self._masks[key] = paddle.to_tensor(np.tile((allowed - 1) * np.float32(1e9), (groups, 1)))
        return self._masks[key]

    def rotation(self, spec: AttentionSpec) -> _Rotation:
        """Return the rotary embedding. Layers with the same tables share it."""
        key = id(spec.rope_cos)
        if key not in self._rotations:
            half = np.arange(spec.rotated // 2)
            first, second = (2 * half, 2 * half + 1) if spec.interleaved else (half, half + len(half))
            turn = np.zeros((spec.head_dim, spec.head_dim), np.float32)
            turn[second, first], turn[first, second] = -1, 1
            pairs = paddle.to_tensor(np.argsort(np.concatenate([first, second])) % len(half))  # of each dimension
            tables = (table[: self.length] for table in (spec.rope_cos, spec.rope_sin))
            cos, sin = (paddle.index_select(table, pairs, axis=1) for table in tables)
            rest = [0, spec.head_dim - spec.rotated]  # dimensions that are not rotated
            cos, sin = F.pad(cos, rest, value=1.0), F.pad(sin, rest)
            self._rotations[key] = _Rotation(cos, sin, paddle.to_tensor(turn))
        return self._rotations[key]


def _added(residual: paddle.Tensor, block: Block, batch: _Batch) -> paddle.Tensor:
    """Return what a block adds to the residual [B * T, hidden_size]."""
    x = _norm(residual, block.norm, block.norm_eps)
    if isinstance(block, ExpertsBlock):
        return _experts(x, block, batch)
    if isinstance(block, LatentAttentionBlock):
        return _latent_attention(x, block, batch)
    if isinstance(block, MlpBlock):
        out = _mlp(x, block.gate_up, block.down, block.activation)
    else:
        out = _attention(x, block, batch)
    return out if block.post_norm is None else _norm(out, block.post_norm, block.norm_eps)


def _attention(x: paddle.Tensor, block: AttentionBlock, batch: _Batch) -> paddle.Tensor:
    spec = block.attention
    heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = _linear(x, block.qkv).reshape([batch.sequences, batch.length, heads + 2 * kv, dim])
    qk, v = paddle.split(qkv.transpose([0, 2, 1, 3]), [heads + kv, kv], axis=1)
    if spec.q_norm is not None and spec.k_norm is not None:
        qk = _head_norm(qk, paddle.stack([spec.q_norm] * heads + [spec.k_norm] * kv), spec.norm_eps)
    cos, sin, quarter_turn = batch.rotation(spec)
    qk = qk * cos + paddle.matmul(qk, quarter_turn) * sin
    q, k = paddle.split(qk, [heads, kv], axis=1)
    q = q.reshape([batch.sequences, kv, heads // kv * batch.length, dim]) * spec.scale
    scores = paddle.matmul(q, k, transpose_y=True) + batch.mask(spec)
    if spec.sinks is not None:
        sinks = _rows(spec.sinks, x.shape[0]).reshape([batch.sequences, batch.length, heads]).transpose([0, 2, 1])
        scores = paddle.concat([scores, sinks.reshape([*scores.shape[:-1], 1])], axis=-1)
    weights = F.softmax(scores, -1)
    if spec.sinks is not None:
        weights = paddle.split(weights, [batch.length, 1], axis=-1)[0]
    out = paddle.matmul(weights, v).reshape([batch.sequences, heads, batch.length, dim]).transpose([0, 2, 1, 3])
    return _linear(out.reshape([batch.sequences * batch.length, heads * dim]), block.o)


def _latent_attention(x: paddle.Tensor, block: LatentAttentionBlock, batch: _Batch) -> paddle.Tensor:
    """Attention over the keys and values of all heads, which takes less time here than absorbed weights."""
    spec, shape = block.attention, [batch.sequences, batch.length, block.attention.num_heads, -1]
    c, turned_key = paddle.split(_linear(x, block.kv_a), [block.kv_b.in_features, spec.rotated], axis=1)
    kv = _linear(_norm(c, block.kv_norm, spec.norm_eps), block.kv_b).reshape(shape).transpose([0, 2, 1, 3])
    if block.q_a is not None and block.q_norm is not None:
        x = _norm(_linear(x, block.q_a), block.q_norm, spec.norm_eps)
    q = _linear(x, block.q).reshape(shape).transpose([0, 2, 1, 3])
    plain = block.absorbed.in_features
    q, turned = paddle.split(q, [plain, spec.rotated], axis=3)
    k, v = paddle.split(kv, [plain, kv.shape[3] - plain], axis=3)
    cos, sin, turn = batch.rotation(spec)
    cos, sin, turn = cos[:, : spec.rotated], sin[:, : spec.rotated], turn[: spec.rotated, : spec.rotated]
    turned_key = turned_key.reshape([batch.sequences, 1, batch.length, spec.rotated])
    turned, turned_key = (one * cos + paddle.matmul(one, turn) * sin for one in (turned, turned_key))
    scores = paddle.matmul(q, k, transpose_y=True) + paddle.matmul(turned, turned_key, transpose_y=True)
    weights = F.softmax(scores * spec.scale + batch.mask(spec)[: batch.length], -1)
    out = paddle.matmul(weights, v).transpose([0, 2, 1, 3])
    return _linear(out.reshape([batch.sequences * batch.length, -1]), block.o)


def _mlp(x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear, activation: Activation) -> paddle.Tensor:
    return _linear(_gated(_linear(x, gate_up), activation), down)


def _experts(x: paddle.Tensor, block: ExpertsBlock, batch: _Batch) -> paddle.Tensor:
    assert batch.experts is not None
    chosen = batch.experts[:, block.routing.place]
    rows, top_k = chosen.shape
    groups = _Groups(chosen, block.experts)
    inner = _gated(groups.linear(F.embedding(groups.rows, x), block.gate_up), block.activation)
    found = groups.linear(inner, block.down)
    none = paddle.zeros([rows * top_k - found.shape[0], x.shape[1]])  # of padding
    outputs = F.embedding(groups.places, paddle.concat([found, none])).reshape([rows, top_k, x.shape[1]])
    weights = _expert_weights(_linear(x, block.router), chosen, block.routing)
    out = paddle.matmul(weights.unsqueeze(1), outputs).squeeze(1)
    if block.shared_gate_up is None or block.shared_down is None:
        return out
    return out + _mlp(x, block.shared_gate_up, block.shared_down, block.activation)


class _Groups:
    """The choices of rows, grouped by expert. chosen: int64 [rows, top_k], an expert or NO_EXPERT.

    rows: the row of each choice, the choices of the first expert first. places: of each choice in this order; those of
    NO_EXPERT come last."""

    def __init__(self, chosen: np.ndarray, experts: int):
        of_choices = np.where(chosen == NO_EXPERT, experts, chosen).ravel()
        order = np.argsort(of_choices, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._sorted = of_choices[order][: int((of_choices < experts).sum())]
        self._experts = experts
        self.rows = paddle.to_tensor(order[: len(self._sorted)] // chosen.shape[1])
        self.places = paddle.to_tensor(places)

    def linear(self, x: paddle.Tensor, linear: PackedLinear) -> paddle.Tensor:
        """Return the product of each choice with its expert's part of a linear: x [choices, in] -> [choices, out]."""
        leaf = as_leaf(linear)
        parts = paddle.split(leaf.weight, self._experts)
        used, counts = np.unique(self._sorted, return_counts=True)
        pieces = zip(used.tolist(), paddle.split(x, counts.tolist()), strict=True)
        y = paddle.concat([paddle.matmul(piece, parts[expert], transpose_y=True) for expert, piece in pieces])
        if leaf.bias is None:
            return y
        return y + F.embedding(paddle.to_tensor(self._sorted), leaf.bias.reshape([self._experts, -1]))


def _expert_weights(logits: paddle.Tensor, chosen: np.ndarray, spec: RouterSpec) -> paddle.Tensor:
    """Return the weight of each choice [rows, top_k] from the router's logits [rows, experts]: see ``RouterSpec``."""
    at = paddle.to_tensor(np.where(chosen == NO_EXPERT, 0, chosen))
    if spec.score is RouterScore.SOFTMAX_OF_CHOSEN:
        weights = F.softmax(paddle.take_along_axis(logits, at, 1), -1)
    else:
        scores = F.softmax(logits, -1) if spec.score is RouterScore.SOFTMAX else F.sigmoid(logits)
        weights = paddle.take_along_axis(scores, at, 1)
    if spec.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clip(min=spec.norm_min)
    return weights if spec.scale == 1.0 else weights * spec.scale


def _gated(gate_up: paddle.Tensor, activation: Activation) -> paddle.Tensor:
    """Return the activation of gate and up: gate_up [N, 2I] -> [N, I]."""
    if activation is Activation.SILU:
        return F.swiglu(gate_up)
    gate, up = paddle.split(gate_up, 2, axis=1)
    if activation is Activation.SWIGLU_CLAMPED:
        gate, up = gate.clip(max=SWIGLU_LIMIT), up.clip(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * F.sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)
    return F.gelu(gate, approximate=True) * up


def _norm(x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
    """Return the RMSNorm over the last axis of x [N, size]."""
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + eps) * _rows(weight, x.shape[0])


def _head_norm(x: paddle.Tensor, weights: paddle.Tensor, eps: float) -> paddle.Tensor:
    """Return the RMSNorm of each head: x [B, heads, T, head_dim], weights [heads, head_dim]."""
    batch, heads, length, dim = x.shape
    rows = _rows(weights.flatten(), batch * length).reshape([batch, length, heads, dim]).transpose([0, 2, 1, 3])
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + eps) * rows


def _linear(x: paddle.Tensor, linear: PackedLinear) -> paddle.Tensor:
    leaf = as_leaf(linear)
    y = paddle.matmul(x, leaf.weight, transpose_y=True)
    return y if leaf.bias is None else y + _rows(leaf.bias, y.shape[0])


def _rows(vector: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return a vector [size] as ``count`` equal rows. The gradient of an outer product is a matrix product, ten times
    faster on a CPU than the sum over rows that is the gradient of a broadcast."""
    return paddle.matmul(paddle.ones([count, 1]), vector.unsqueeze(0))
