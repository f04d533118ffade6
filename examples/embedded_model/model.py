"""A Qwen3 decoder in plain Paddle with gradients, for the training of the embedded model and for tests.

The server has its own model, on paged KV. Weights are a dict from Hugging Face name to float32 tensor, linear weights
[out_features, in_features].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F

Weights = dict[str, paddle.Tensor]
Cache = list[tuple[paddle.Tensor, paddle.Tensor]]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model, under the names of Hugging Face's config.json."""

    vocab_size: int = 272
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """Draw random weights: normal(0, 0.05), divided by sqrt(2 * layers) for o_proj and down_proj; norms are 1."""
    rng = np.random.default_rng(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q_size, hidden),
            layer + "self_attn.k_proj.weight": (kv_size, hidden),
            layer + "self_attn.v_proj.weight": (kv_size, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q_size),
            layer + "self_attn.q_norm.weight": (config.head_dim,),
            layer + "self_attn.k_norm.weight": (config.head_dim,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        back = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 0.05 / math.sqrt(2 * config.num_hidden_layers) if back else 0.05
        return rng.normal(0, scale, shape).astype(np.float32)

    return {
        name: paddle.to_tensor(draw(name, shape), place=paddle.CPUPlace(), stop_gradient=False)
        for name, shape in shapes.items()
    }


class Rope:
    """Rotary embedding: at position p, the pair (i, i + head_dim/2) rotates by p * theta^(-2i/head_dim)."""

    def __init__(self, config: ModelConfig):
        half = config.head_dim // 2
        angle = np.outer(np.arange(config.max_position_embeddings), config.rope_theta ** (-np.arange(half) / half))
        angle = np.concatenate([angle, angle], 1)
        self._cos = paddle.to_tensor(np.cos(angle).astype(np.float32))
        self._sin = paddle.to_tensor(np.sin(angle).astype(np.float32))
        # x @ quarter_turn = (-second half of x, first half of x): faster with gradients than split and concat.
        quarter_turn = np.zeros((2 * half, 2 * half), np.float32)
        quarter_turn[half:, :half], quarter_turn[:half, half:] = -np.eye(half), np.eye(half)
        self._quarter_turn = paddle.to_tensor(quarter_turn)

    def rotate(self, x: paddle.Tensor, past: int) -> paddle.Tensor:
        """Rotate x [B, heads, T, head_dim], whose first token has position ``past``."""
        at = slice(past, past + x.shape[2])
        return x * self._cos[at] + paddle.matmul(x, self._quarter_turn) * self._sin[at]


class Qwen3:
    """The model as a function of its weights."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.weights = weights
        self._rope = Rope(config)

    def logits(
        self, ids: paddle.Tensor, visible: paddle.Tensor | None = None, cache: Cache | None = None
    ) -> paddle.Tensor:
        """Return the logits [B, T, vocab_size] of ids [B, T].

        cache: one (k, v) pair [B, kv_heads, past, head_dim] per layer, or empty; extended in place by the T tokens.
        visible: bool [B, past + T], False for padding; None: no padding.
        """
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        past = cache[0][0].shape[2] if cache else 0
        bias = self._attention_bias(ids.shape[0], past, ids.shape[1], visible)
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}."
            x = x + self._attention(layer, self._norm(x, layer + "input_layernorm"), past, bias, cache, i)
            y = self._norm(x, layer + "post_attention_layernorm")
            gate = F.silu(self._linear(y, layer + "mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(y, layer + "mlp.up_proj"), layer + "mlp.down_proj")
        x = self._norm(x, "model.norm")
        return paddle.matmul(x, self.weights["model.embed_tokens.weight"], transpose_y=True)

    def _linear(self, x: paddle.Tensor, name: str) -> paddle.Tensor:
        return paddle.matmul(x, self.weights[name + ".weight"], transpose_y=True)

    def _norm(self, x: paddle.Tensor, name: str) -> paddle.Tensor:
        scale = paddle.rsqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weight = self.weights[name + ".weight"]
        # An outer product instead of a broadcast: its gradient is a matmul, ten times faster than a reduction here.
        rows = paddle.matmul(paddle.ones([x.size // weight.size, 1]), weight.unsqueeze(0))
        return x * scale * rows.reshape(x.shape)

    def _attention_bias(self, batch: int, past: int, length: int, visible: paddle.Tensor | None) -> paddle.Tensor:
        """Return 0 for keys that a query attends to and -1e9 for others, in the shape of the scores in _attention."""
        allowed = paddle.tril(paddle.ones([length, past + length]), diagonal=past)
        if visible is not None:
            allowed = allowed * visible.astype("float32")[:, None, None, None, :]
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return ((allowed - 1.0) * 1e9).expand([batch, heads[1], heads[0] // heads[1], length, past + length])

    def _heads(self, x: paddle.Tensor, heads: int) -> paddle.Tensor:
        """Reshape [B, T, heads * head_dim] to [B, heads, T, head_dim]."""
        return x.reshape([x.shape[0], x.shape[1], heads, self.config.head_dim]).transpose([0, 2, 1, 3])

    def _attention(
        self, layer: str, x: paddle.Tensor, past: int, bias: paddle.Tensor, cache: Cache | None, index: int
    ) -> paddle.Tensor:
        config, at = self.config, layer + "self_attn."
        batch, length = x.shape[0], x.shape[1]
        groups = config.num_attention_heads // config.num_key_value_heads
        q = self._heads(self._linear(x, at + "q_proj"), config.num_attention_heads)
        k = self._heads(self._linear(x, at + "k_proj"), config.num_key_value_heads)
        v = self._heads(self._linear(x, at + "v_proj"), config.num_key_value_heads)
        q = self._rope.rotate(self._norm(q, at + "q_norm"), past)
        k = self._rope.rotate(self._norm(k, at + "k_norm"), past)
        if cache is not None:
            if index < len(cache):
                k, v = paddle.concat([cache[index][0], k], 2), paddle.concat([cache[index][1], v], 2)
                cache[index] = (k, v)
            else:
                cache.append((k, v))
        q = q.reshape([batch, config.num_key_value_heads, groups, length, config.head_dim])
        scores = paddle.matmul(q * config.head_dim**-0.5, k.unsqueeze(2), transpose_y=True)
        out = paddle.matmul(F.softmax(scores + bias, -1), v.unsqueeze(2))
        out = out.reshape([batch, config.num_attention_heads, length, config.head_dim]).transpose([0, 2, 1, 3])
        return self._linear(out.reshape([batch, length, -1]), at + "o_proj")
