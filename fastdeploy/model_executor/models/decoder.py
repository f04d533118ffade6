"""Parts that decoder-only models have in common: rotary tables, the builders of blocks, and the model around them.

A builder of a block knows the parameters of its block in each layer, and makes the block from their packed values. An
architecture is a ``Decoder`` with one builder for each block of a layer. Tensor names are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import paddle

from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.models.interface import ModelWeights
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    AttentionBlock,
    AttentionSpec,
    Block,
    DecoderLayer,
    KVCache,
    MlpBlock,
    Ops,
    PackedAdapter,
    PackedLora,
)
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear, as_vector, linear, vector

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Rope(NamedTuple):
    """Tables of the rotary embedding, float32 [max_model_len, head_dim // 2]."""

    cos: paddle.Tensor
    sin: paddle.Tensor


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return the angle per position of each rotated pair, float32 [head_dim // 2]: theta^(-2i / head_dim)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def rope_tables(frequencies: np.ndarray, max_model_len: int) -> Rope:
    """Return the tables for positions 0 to max_model_len - 1."""
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
    return Rope(paddle.to_tensor(np.cos(angles)), paddle.to_tensor(np.sin(angles)))


class BlockBuilder(Protocol):
    """Builds one block of every layer."""

    def parameters(self, layer: int) -> list[Parameter]:
        """Return the parameters of the block in this layer, its linears in the order of ``linears`` of the block."""

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """Make the block of this layer. values: the packed value of each parameter, by key."""


@dataclass(frozen=True)
class Attention:
    """Builds attention blocks. qk_norm: q and k have an RMSNorm per head."""

    config: ModelConfig
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        c, key, prefix = self.config, f"layers.{layer}.", f"model.layers.{layer}."
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        projections = {f"{prefix}self_attn.{name}_proj": size for name, size in (("q", q), ("k", kv), ("v", kv))}
        found = [
            vector(key + "input_norm", prefix + "input_layernorm.weight", c.hidden_size),
            linear(key + "qkv", projections, c.hidden_size, self.qkv_bias),
            linear(key + "o", {prefix + "self_attn.o_proj": c.hidden_size}, q, self.o_bias),
        ]
        if self.qk_norm:
            found += [vector(f"{key}{x}_norm", f"{prefix}self_attn.{x}_norm.weight", c.head_dim) for x in "qk"]
        return found

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        c, key = self.config, f"layers.{layer}."
        spec = AttentionSpec(
            layer=layer,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
            rope_cos=self.rope.cos,
            rope_sin=self.rope.sin,
            q_norm=as_vector(values[key + "q_norm"]) if self.qk_norm else None,
            k_norm=as_vector(values[key + "k_norm"]) if self.qk_norm else None,
            norm_eps=c.rms_norm_eps,
        )
        norm, qkv, o = as_vector(values[key + "input_norm"]), as_linear(values[key + "qkv"]), values[key + "o"]
        return AttentionBlock(norm, c.rms_norm_eps, qkv, spec, as_linear(o))


@dataclass(frozen=True)
class Mlp:
    """Builds MLP blocks with a SiLU gate."""

    config: ModelConfig
    bias: bool = False

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        c, key, prefix = self.config, f"layers.{layer}.", f"model.layers.{layer}."
        gate_up = {f"{prefix}mlp.{name}_proj": c.intermediate_size for name in ("gate", "up")}
        return [
            vector(key + "post_norm", prefix + "post_attention_layernorm.weight", c.hidden_size),
            linear(key + "gate_up", gate_up, c.hidden_size, self.bias),
            linear(key + "down", {prefix + "mlp.down_proj": c.hidden_size}, c.intermediate_size, self.bias),
        ]

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        key = f"layers.{layer}."
        norm, gate_up, down = values[key + "post_norm"], values[key + "gate_up"], values[key + "down"]
        return MlpBlock(as_vector(norm), self.config.rms_norm_eps, as_linear(gate_up), as_linear(down))


class Decoder:
    """A decoder-only model: an embedding, layers of blocks, an RMSNorm and an output head. Implements ``Model``."""

    def __init__(self, config: ModelConfig, ops: Ops, builders: Sequence[BlockBuilder]):
        self.config, self.ops = config, ops
        self._builders = tuple(builders)
        self.aliases: Mapping[str, str] = {LM_HEAD: EMBEDDING} if config.tie_word_embeddings else {}
        embedding, head = (
            linear(key, {name.removesuffix(".weight"): config.vocab_size}, config.hidden_size)
            for key, name in (("embedding", EMBEDDING), ("lm_head", LM_HEAD))
        )
        layers = range(config.num_hidden_layers)
        of_layers = [one for layer in layers for builder in self._builders for one in builder.parameters(layer)]
        ends = [vector("norm", NORM, config.hidden_size)] + ([] if config.tie_word_embeddings else [head])
        self.parameters: tuple[Parameter, ...] = (embedding, *of_layers, *ends)
        self.adaptable: tuple[Parameter, ...] = (*(one for one in of_layers if not one.is_vector), head)

    def assemble(self, values: Mapping[str, Value]) -> ModelWeights:
        """See ``Model.assemble``."""
        layers = tuple(
            DecoderLayer(tuple(builder.build(values, layer) for builder in self._builders))
            for layer in range(self.config.num_hidden_layers)
        )
        embedding = as_linear(values["embedding"])
        lm_head = embedding if self.config.tie_word_embeddings else as_linear(values["lm_head"])
        return ModelWeights(embedding, layers, as_vector(values["norm"]), lm_head, values)

    def assemble_adapter(self, loras: Mapping[str, PackedLora]) -> PackedAdapter:
        """See ``Model.assemble_adapter``."""
        layers = tuple(
            tuple(
                tuple(loras.get(one.key) for one in builder.parameters(layer) if not one.is_vector)
                for builder in self._builders
            )
            for layer in range(self.config.num_hidden_layers)
        )
        adapter = PackedAdapter(layers, loras.get("lm_head"), sum(lora.nbytes for lora in loras.values()))
        self.ops.gather_adapter(adapter)
        return adapter

    def forward(
        self,
        weights: ModelWeights,
        token_ids: np.ndarray,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray,
        between_layers: Callable[[], None] | None = None,
        adapters: AdapterRows | None = None,
    ) -> paddle.Tensor:
        """See ``Model.forward``."""
        hidden = self.ops.embedding(token_ids, weights.embedding)
        return self.ops.decoder_layers(hidden, weights.layers, cache, batch, rows, between_layers, adapters)

    def logits(
        self, weights: ModelWeights, hidden: paddle.Tensor, adapters: AdapterRows | None = None
    ) -> paddle.Tensor:
        """See ``Model.logits``."""
        return self.ops.logits(hidden, weights.norm, self.config.rms_norm_eps, weights.lm_head, adapters)
