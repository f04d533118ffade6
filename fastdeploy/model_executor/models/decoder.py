"""Parts that decoder-only models have in common: rotary tables, and the builders of blocks. Tensor names are those of
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.ops.interface import AttentionBlock, AttentionSpec, Block, MlpBlock
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear, as_vector, linear, vector


class Rope(NamedTuple):
    """The tables of the rotary embedding, float32 [max_model_len, head_dim // 2]."""

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


@dataclass(frozen=True)
class Attention:
    """The builder of attention blocks. qk_norm: q and k have an RMSNorm per head. interleaved: see
    ``AttentionSpec``."""

    config: ModelConfig
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False

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
            interleaved=int(self.interleaved),
        )
        norm, qkv, o = as_vector(values[key + "input_norm"]), as_linear(values[key + "qkv"]), values[key + "o"]
        return AttentionBlock(norm, c.rms_norm_eps, qkv, spec, as_linear(o))


@dataclass(frozen=True)
class Mlp:
    """The builder of MLP blocks with a SiLU gate."""

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
