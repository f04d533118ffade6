"""Qwen2, Qwen2.5 and Qwen3 (dense). They differ in three places: biases of the attention projections, RMSNorm on q and
k, and a head_dim of its own. All of that is in ModelConfig; the code below is one model.

Weights are immutable: an update makes a second ``QwenWeights`` beside the first, and serving switches by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import paddle

from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.ops.interface import (
    AttentionBatch,
    AttentionSpec,
    DecoderLayer,
    KVCache,
    Ops,
    PackedLinear,
)
from fastdeploy.model_executor.parameters import Parameter, Value

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class QwenWeights:
    """``lm_head`` is ``embedding`` itself where they are tied. ``values``: all, by the key of their parameter."""

    embedding: PackedLinear
    layers: tuple[DecoderLayer, ...]
    norm: paddle.Tensor
    lm_head: PackedLinear
    values: Mapping[str, Value]


class Qwen:
    """The computation, without weights: ``assemble`` makes those of their parts, ``forward`` takes them.

    parameters: what the weights are made of. aliases: tensors that a checkpoint may carry though another one serves in
    their place; they must have the same values (transformers ignores lm_head.weight where embeddings are tied, but no
    trainer means to have a tensor ignored).
    """

    def __init__(self, config: ModelConfig, ops: Ops, max_model_len: int):
        self.config, self.ops = config, ops
        self.parameters = self._parameters()
        self.aliases = {LM_HEAD: EMBEDDING} if config.tie_word_embeddings else {}
        half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        frequencies = (1.0 / np.float32(config.rope_theta) ** half).astype(np.float32)
        angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
        self.rope_cos, self.rope_sin = paddle.to_tensor(np.cos(angles)), paddle.to_tensor(np.sin(angles))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must have."""
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

    def _parameters(self) -> tuple[Parameter, ...]:
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        linears = [
            ("qkv", "self_attn.", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), c.qkv_bias),
            ("o", "self_attn.", ("o_proj",), (c.hidden_size,), c.o_bias),
            ("gate_up", "mlp.", ("gate_proj", "up_proj"), (c.intermediate_size,) * 2, False),
            ("down", "mlp.", ("down_proj",), (c.hidden_size,), False),
        ]
        vectors = [("input_norm", "input_layernorm"), ("post_norm", "post_attention_layernorm")]
        if c.qk_norm:
            vectors += [("q_norm", "self_attn.q_norm"), ("k_norm", "self_attn.k_norm")]
        found = [Parameter("embedding", (EMBEDDING,), (c.vocab_size,))]
        for layer in range(c.num_hidden_layers):
            key, prefix = f"layers.{layer}.", f"model.layers.{layer}."
            found += [Parameter(key + short, (f"{prefix}{name}.weight",)) for short, name in vectors]
            for short, where, names, rows, biased in linears:
                weights = tuple(f"{prefix}{where}{name}.weight" for name in names)
                biases = tuple(f"{prefix}{where}{name}.bias" for name in names) if biased else ()
                found.append(Parameter(key + short, weights, rows, biases))
        found.append(Parameter("norm", (NORM,)))
        if not c.tie_word_embeddings:
            found.append(Parameter("lm_head", (LM_HEAD,), (c.vocab_size,)))
        return tuple(found)

    def assemble(self, values: Mapping[str, Value]) -> QwenWeights:
        """values: what each of ``parameters`` was packed to, by key."""
        layers = tuple(self._layer(values, layer) for layer in range(self.config.num_hidden_layers))
        embedding = values["embedding"]
        return QwenWeights(embedding, layers, values["norm"], values.get("lm_head", embedding), values)

    def _layer(self, values: Mapping[str, Value], layer: int) -> DecoderLayer:
        c, key = self.config, f"layers.{layer}."
        attention = AttentionSpec(
            layer=layer,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
            rope_cos=self.rope_cos,
            rope_sin=self.rope_sin,
            q_norm=values.get(key + "q_norm"),
            k_norm=values.get(key + "k_norm"),
            norm_eps=c.rms_norm_eps,
        )
        return DecoderLayer(
            input_norm=values[key + "input_norm"],
            qkv=values[key + "qkv"],
            attention=attention,
            o=values[key + "o"],
            post_norm=values[key + "post_norm"],
            gate_up=values[key + "gate_up"],
            down=values[key + "down"],
        )

    def forward(
        self,
        weights: QwenWeights,
        token_ids: np.ndarray,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray,
        between_layers: Callable[[], None] | None = None,
    ) -> paddle.Tensor | None:
        """token_ids int32 [T] -> hidden states float32 [len(rows), hidden_size] of these token rows (ascending, int64),
        ready for ``logits``, or None if there are none. Keys and values of all T tokens are in the cache afterwards.
        ``between_layers``: see ``Ops.decoder_layers``."""
        hidden = self.ops.embedding(token_ids, weights.embedding)
        hidden = self.ops.decoder_layers(hidden, weights.layers, cache, batch, rows, between_layers)
        return hidden if len(rows) else None

    def logits(self, weights: QwenWeights, hidden: paddle.Tensor) -> paddle.Tensor:
        """hidden [N, hidden_size] -> float32 [N, vocab_size], in memory that the next call may overwrite."""
        return self.ops.logits(hidden, weights.norm, self.config.rms_norm_eps, weights.lm_head)
