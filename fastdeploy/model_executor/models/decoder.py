"""Parts that decoder-only models have in common: rotary tables, and the builders of blocks. Tensor names are those of
transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import (
    ModelConfig,
    count,
    flag,
    positive,
    refuse_rope_scaling,
    rope_settings,
)
from fastdeploy.model_executor.models.interface import BlockBuilder, norm_weight
from fastdeploy.model_executor.ops.blocks import Activation, AttentionBlock, AttentionSpec, Block, MlpBlock
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear, as_vector, linear, vector


class Rope(NamedTuple):
    """The tables of the rotary embedding, float32 [max_model_len, pairs that are rotated]."""

    cos: paddle.Tensor
    sin: paddle.Tensor


def rope_frequencies(rotated: int, theta: float) -> np.ndarray:
    """Return the angle per position of each rotated pair, float32 [rotated // 2]: theta^(-2i / rotated). rotated: how
    many dimensions of a head are rotated."""
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


YARN = "yarn"  # the name in config.json


class Yarn(NamedTuple):
    """The rotary embedding YaRN, with the names of config.json. attention_factor: of cosines and sines. mscale_all_dim:
    0 if the config has none."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool
    attention_factor: float
    mscale_all_dim: float = 0.0


def read_yarn(raw: dict[str, Any]) -> Yarn | None:
    """Read the settings of YaRN, with the defaults of transformers; None for the default rotary embedding. Raises
    InvalidField for another one."""
    refuse_rope_scaling(raw, YARN)
    key, settings = rope_settings(raw)
    if settings.get("rope_type", settings.get("type")) != YARN:
        return None
    there = {name: value for name, value in settings.items() if value is not None}
    factor, original = positive(there, "factor", where=key), "original_max_position_embeddings"
    names = [name for name in ("mscale", "mscale_all_dim") if there.get(name)]
    scales = {name: positive(there, name, where=key) for name in names}
    if "attention_factor" in there:
        attention_factor = positive(there, "attention_factor", where=key)
    elif len(scales) == 2:
        attention_factor = yarn_scale(factor, scales["mscale"]) / yarn_scale(factor, scales["mscale_all_dim"])
    else:
        attention_factor = yarn_scale(factor)
    lengths = {original: raw["max_position_embeddings"]} | there | {k: raw[k] for k in (original,) if k in raw}
    yarn = Yarn(
        factor=factor,
        beta_fast=positive(there, "beta_fast", 32.0, where=key),
        beta_slow=positive(there, "beta_slow", 1.0, where=key),
        original_max_position_embeddings=count(lengths, original, where=key),
        truncate=flag({"truncate": True} | there, "truncate", where=key),
        attention_factor=attention_factor,
        mscale_all_dim=scales.get("mscale_all_dim", 0.0),
    )
    if yarn.beta_fast < yarn.beta_slow:
        found = f"{yarn.beta_fast:g}, less than {yarn.beta_slow:g}"
        raise InvalidField(f"{key}.beta_fast", f"expected at least beta_slow, got {found}")
    return yarn


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return by how much YaRN multiplies queries and keys of a context that is ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_frequencies(head_dim: int, theta: float, yarn: Yarn) -> np.ndarray:
    """Return the frequencies of YaRN, float32 [head_dim // 2]: those of :func:`rope_frequencies` for short waves, of
    which more than beta_fast periods fit into the original context; divided by ``factor`` for long ones, of which fewer
    than beta_slow fit; and between the two interpolated linearly in the dimension. The formula is that of "yarn" in
    modeling_rope_utils.py of transformers. Raises InvalidField for a theta of at most 1, which has no long waves."""
    if theta <= 1:
        raise InvalidField("rope_theta", f"expected more than 1 with YaRN, got {theta:g}")

    def dimension(periods: float) -> float:
        waves = yarn.original_max_position_embeddings / (periods * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    frequencies = rope_frequencies(head_dim, theta)
    return (frequencies / np.float32(yarn.factor) * divided + frequencies * (1 - divided)).astype(np.float32)


def rope_tables(frequencies: np.ndarray, max_model_len: int, factor: float = 1.0) -> Rope:
    """Return the tables for positions 0 to max_model_len - 1. factor: of the cosines and sines."""
    angles, scale = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies, np.float32(factor)
    return Rope(paddle.to_tensor(np.cos(angles) * scale), paddle.to_tensor(np.sin(angles) * scale))


def rope_of(head_dim: int, theta: float, yarn: Yarn | None, max_model_len: int) -> Rope:
    """Return the tables of YaRN, or of the default rotary embedding without ``yarn``."""
    if yarn is None:
        return rope_tables(rope_frequencies(head_dim, theta), max_model_len)
    return rope_tables(yarn_frequencies(head_dim, theta, yarn), max_model_len, yarn.attention_factor)


@dataclass(frozen=True)
class ByLayer:
    """The builder of one block of every layer, where layers differ. builders: one for each layer."""

    builders: Sequence[BlockBuilder]

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        return self.builders[layer].parameters(layer)

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        return self.builders[layer].build(values, layer)


@dataclass(frozen=True)
class Attention:
    """The builder of attention blocks. qk_norm: q and k have an RMSNorm per head. interleaved, window: see
    ``AttentionSpec``. scale: of the scores; None: 1 / sqrt(head_dim). post_norm: the name of the norm of what is added
    to the residual, "" for none. sinks: each head has a sink."""

    config: ModelConfig
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False
    window: int = 0
    scale: float | None = None
    post_norm: str = ""
    sinks: bool = False

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
        if self.post_norm:
            found.append(vector(key + "attention_out_norm", f"{prefix}{self.post_norm}.weight", c.hidden_size))
        if self.sinks:
            found.append(vector(key + "sinks", prefix + "self_attn.sinks", c.num_attention_heads))
        return found

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        c, key = self.config, f"layers.{layer}."

        def norm(name: str, there: bool = True) -> paddle.Tensor | None:
            return norm_weight(c, values[key + name]) if there else None

        spec = AttentionSpec(
            layer=layer,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5 if self.scale is None else self.scale,
            rope_cos=self.rope.cos,
            rope_sin=self.rope.sin,
            q_norm=norm("q_norm", self.qk_norm),
            k_norm=norm("k_norm", self.qk_norm),
            norm_eps=c.rms_norm_eps,
            interleaved=int(self.interleaved),
            window=self.window,
            rotary_dim=2 * self.rope.cos.shape[1],
            sinks=as_vector(values[key + "sinks"]) if self.sinks else None,
        )
        qkv, o = as_linear(values[key + "qkv"]), as_linear(values[key + "o"])
        post_norm = norm("attention_out_norm", bool(self.post_norm))
        return AttentionBlock(norm_weight(c, values[key + "input_norm"]), c.rms_norm_eps, qkv, spec, o, post_norm)


@dataclass(frozen=True)
class Mlp:
    """The builder of MLP blocks. norm, post_norm: the names of the norms of the input, and of what is added to the
    residual, "" for none."""

    config: ModelConfig
    bias: bool = False
    activation: Activation = Activation.SILU
    norm: str = "post_attention_layernorm"
    post_norm: str = ""

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        c, key, prefix = self.config, f"layers.{layer}.", f"model.layers.{layer}."
        gate_up = {f"{prefix}mlp.{name}_proj": c.intermediate_size for name in ("gate", "up")}
        found = [
            vector(key + "post_norm", f"{prefix}{self.norm}.weight", c.hidden_size),
            linear(key + "gate_up", gate_up, c.hidden_size, self.bias),
            linear(key + "down", {prefix + "mlp.down_proj": c.hidden_size}, c.intermediate_size, self.bias),
        ]
        if self.post_norm:
            found.append(vector(key + "mlp_out_norm", f"{prefix}{self.post_norm}.weight", c.hidden_size))
        return found

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        c, key = self.config, f"layers.{layer}."
        norm, gate_up, down = values[key + "post_norm"], as_linear(values[key + "gate_up"]), values[key + "down"]
        post_norm = norm_weight(c, values[key + "mlp_out_norm"]) if self.post_norm else None
        return MlpBlock(norm_weight(c, norm), c.rms_norm_eps, gate_up, as_linear(down), self.activation, post_norm)
