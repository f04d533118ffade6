"""Qwen2, Qwen2.5 and Qwen3 (dense). They differ in three places: biases of the attention projections, RMSNorm on q and
k, and a head_dim of its own. All of that is in ModelConfig; the code below is one model.

Weights are immutable: an update makes a second ``QwenWeights`` beside the first, and serving switches by reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from fastdeploy.model_executor.loader import Checkpoint, refuse_tensor
from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.ops.interface import AttentionBatch, AttentionSpec, KVCache, Ops, PackedLinear

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class QwenLayer:
    """qkv packs q, k, v; gate_up packs gate, up. Norm weights are float32 [hidden_size]."""

    input_norm: paddle.Tensor
    qkv: PackedLinear
    attention: AttentionSpec
    o: PackedLinear
    post_norm: paddle.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class QwenWeights:
    """``lm_head`` is ``embedding`` itself where they are tied."""

    embedding: PackedLinear
    layers: tuple[QwenLayer, ...]
    norm: paddle.Tensor
    lm_head: PackedLinear

    @property
    def nbytes(self) -> int:
        """Bytes of the packed linears (norms are thousands of times smaller)."""
        linears = {id(w): w for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)}
        linears |= {id(w): w for w in (self.embedding, self.lm_head)}
        return sum(w.nbytes for w in linears.values())


class Qwen:
    """The computation, without weights: ``load`` makes those, ``forward`` takes them."""

    def __init__(self, config: ModelConfig, ops: Ops, max_model_len: int):
        self.config, self.ops = config, ops
        half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        frequencies = (1.0 / np.float32(config.rope_theta) ** half).astype(np.float32)
        angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
        self.rope_cos, self.rope_sin = paddle.to_tensor(np.cos(angles)), paddle.to_tensor(np.sin(angles))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must have, in the order they are read."""
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, hidden)}
        for layer in range(c.num_hidden_layers):
            own: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                own[f"self_attn.{name}_proj.weight"] = (size, hidden)
                if c.qkv_bias:
                    own[f"self_attn.{name}_proj.bias"] = (size,)
            own["self_attn.o_proj.weight"] = (hidden, q)
            if c.o_bias:
                own["self_attn.o_proj.bias"] = (hidden,)
            if c.qk_norm:
                own["self_attn.q_norm.weight"] = own["self_attn.k_norm.weight"] = (c.head_dim,)
            own["post_attention_layernorm.weight"] = (hidden,)
            own["mlp.gate_proj.weight"] = own["mlp.up_proj.weight"] = (inner, hidden)
            own["mlp.down_proj.weight"] = (hidden, inner)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        shapes[NORM] = (hidden,)
        if not c.tie_word_embeddings:
            shapes[LM_HEAD] = (c.vocab_size, hidden)
        return shapes

    def load(self, checkpoint: Checkpoint) -> QwenWeights:
        """Check all names, shapes and types, then read and pack linear by linear: beside the packed copy only the
        tensors of one linear are held. Raises WeightUpdateRefused.

        A checkpoint of a tied model may carry lm_head.weight too, if its bits are those of the embedding: another
        one would be ignored by a tied model, which no trainer means.
        """
        tied = self.config.tie_word_embeddings
        checkpoint.check(self.tensor_shapes(), frozenset({LM_HEAD}) if tied else frozenset())
        table = checkpoint.read(EMBEDDING)
        if tied and LM_HEAD in checkpoint.entries and not _same_bits(table, checkpoint.read(LM_HEAD)):
            raise refuse_tensor(LM_HEAD, f"differs from {EMBEDDING}, but tie_word_embeddings is true")
        embedding = self.ops.pack_linear([table])
        del table
        layers = tuple(self._load_layer(checkpoint, layer) for layer in range(self.config.num_hidden_layers))
        lm_head = embedding if tied else self._pack(checkpoint, [LM_HEAD.removesuffix(".weight")])
        return QwenWeights(embedding, layers, _vector(checkpoint, NORM), lm_head)

    def _load_layer(self, checkpoint: Checkpoint, layer: int) -> QwenLayer:
        c, prefix = self.config, f"model.layers.{layer}."
        attention = AttentionSpec(
            layer=layer,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
            rope_cos=self.rope_cos,
            rope_sin=self.rope_sin,
            q_norm=_vector(checkpoint, prefix + "self_attn.q_norm.weight") if c.qk_norm else None,
            k_norm=_vector(checkpoint, prefix + "self_attn.k_norm.weight") if c.qk_norm else None,
            norm_eps=c.rms_norm_eps,
        )
        return QwenLayer(
            input_norm=_vector(checkpoint, prefix + "input_layernorm.weight"),
            qkv=self._pack(checkpoint, [f"{prefix}self_attn.{name}_proj" for name in "qkv"], c.qkv_bias),
            attention=attention,
            o=self._pack(checkpoint, [prefix + "self_attn.o_proj"], c.o_bias),
            post_norm=_vector(checkpoint, prefix + "post_attention_layernorm.weight"),
            gate_up=self._pack(checkpoint, [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]),
            down=self._pack(checkpoint, [prefix + "mlp.down_proj"]),
        )

    def _pack(self, checkpoint: Checkpoint, names: list[str], bias: bool = False) -> PackedLinear:
        parts = checkpoint.read_parts([f"{name}.weight" for name in names])
        biases = [checkpoint.read_float32(f"{name}.bias") for name in names] if bias else None
        return self.ops.pack_linear(parts, biases)

    def forward(
        self, weights: QwenWeights, token_ids: np.ndarray, cache: KVCache, batch: AttentionBatch, rows: np.ndarray
    ) -> paddle.Tensor | None:
        """token_ids int32 [T] -> logits float32 [len(rows), vocab_size] of these token rows (ascending, int64), or None
        if there are none. Keys and values of all T tokens are in the cache afterwards."""
        ops, eps = self.ops, self.config.rms_norm_eps
        residual = ops.embedding(token_ids, weights.embedding)
        hidden = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = ops.attention(ops.linear(hidden, layer.qkv), cache, batch, layer.attention)
            if index == last:  # the cache is complete: from here on only the rows that sample matter
                if len(rows) == 0:
                    return None
                if len(rows) < len(token_ids):
                    picked = paddle.to_tensor(rows)
                    attended, residual = paddle.index_select(attended, picked), paddle.index_select(residual, picked)
            hidden = ops.add_rms_norm(ops.linear(attended, layer.o), residual, layer.post_norm, eps)
            hidden = ops.linear(ops.gated_linear(hidden, layer.gate_up), layer.down)
            norm = weights.norm if index == last else weights.layers[index + 1].input_norm
            hidden = ops.add_rms_norm(hidden, residual, norm, eps)
        return ops.linear(hidden, weights.lm_head)


def _vector(checkpoint: Checkpoint, name: str) -> paddle.Tensor:
    return paddle.to_tensor(checkpoint.read_float32(name))


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(np.uint8) == b.view(np.uint8)).all())
