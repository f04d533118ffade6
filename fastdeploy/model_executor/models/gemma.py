"""Gemma 3 (text). Most layers attend to the last tokens only, the others to all. Each of the two kinds has its own
rotary embedding. Every RMSNorm multiplies with 1 + weight, and the result of each block has an RMSNorm, too. The
embedding is scaled, and the gate of the MLP is a GELU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.core.serving_dtype import in_dtype, widen
from fastdeploy.model_executor.model_config import (
    FULL,
    SLIDING,
    ModelConfig,
    count,
    flag,
    layer_kinds,
    positive,
    read_common,
)
from fastdeploy.model_executor.models.decoder import Attention, ByLayer, Mlp, Rope, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.blocks import Activation
from fastdeploy.model_executor.ops.interface import Ops

GELU = "gelu_pytorch_tanh"
DEFAULTS = {
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": GELU,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
# The key at the top level of older checkpoints that has the base of each kind of layer, and its default.
THETA = {SLIDING: ("rope_local_base_freq", 10000.0), FULL: ("rope_theta", 1000000.0)}


class GemmaRope(NamedTuple):
    """The rotary embedding of one kind of layer: its base, and what its frequencies are divided by."""

    theta: float
    factor: float

    def tables(self, head_dim: int, max_model_len: int) -> Rope:
        """Return the tables for positions 0 to max_model_len - 1."""
        return rope_tables(rope_frequencies(head_dim, self.theta) / np.float32(self.factor), max_model_len)


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """The config of a Gemma 3 model. layer_types: of each layer, sliding_attention or full_attention.
    sliding_window: the tokens that a token of a sliding layer attends to, itself included. local_rope, global_rope: of
    the sliding and of the full layers. attention_bias: the four projections of the attention have biases. The field
    rope_theta is that of the full layers."""

    norms_add_one: ClassVar[bool] = True

    query_pre_attn_scalar: float
    sliding_window: int
    layer_types: tuple[str, ...]
    local_rope: GemmaRope
    global_rope: GemmaRope
    attention_bias: bool


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> GemmaConfig:
    """See ``Architecture.read_config``."""
    raw = DEFAULTS | raw
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key) is not None:
            raise InvalidField(key, f"soft caps are not supported, got {shown(raw[key])}")
    if raw.get("use_bidirectional_attention"):
        raise InvalidField("use_bidirectional_attention", "attention to later tokens is not supported")
    if raw["hidden_activation"] != GELU:
        raise InvalidField("hidden_activation", f"only {GELU} is supported, got {shown(raw['hidden_activation'])}")
    ropes = {kind: _read_rope(raw, kind) for kind in (SLIDING, FULL)}
    # transformers does not read hidden_act, and the rotary embedding has keys for each kind of layer.
    common = {key: value for key, value in raw.items() if key not in ("hidden_act", "rope_parameters")}
    config = read_common(common | {"rope_theta": ropes[FULL].theta}, generation)
    return GemmaConfig(
        **vars(config),
        query_pre_attn_scalar=positive(raw, "query_pre_attn_scalar"),
        sliding_window=count(raw, "sliding_window"),
        layer_types=_read_layer_types(raw, config.num_hidden_layers),
        local_rope=ropes[SLIDING],
        global_rope=ropes[FULL],
        attention_bias=flag(raw, "attention_bias"),
    )


def _read_layer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: the key layer_types, or each sliding_window_pattern-th layer is a full one."""
    kinds = raw.get("layer_types")
    if kinds is None:
        period = count(raw, "sliding_window_pattern")
        return tuple(SLIDING if (layer + 1) % period else FULL for layer in range(layers))
    return layer_kinds(kinds, layers)


def _read_rope(raw: dict[str, Any], kind: str) -> GemmaRope:
    """Read the rotary embedding of one kind of layer: rope_parameters has an object for each kind in newer checkpoints.
    rope_scaling, in older ones, is for the full layers."""
    by_kind = _object(raw, "rope_parameters", raw.get("rope_parameters"))
    if unknown := sorted(by_kind.keys() - {SLIDING, FULL}):
        raise InvalidField(f"rope_parameters.{unknown[0]}", f"expected an object for {SLIDING} and one for {FULL}")
    where = f"rope_parameters.{kind}"
    settings = _object(raw, where, by_kind.get(kind))
    if kind == FULL and raw.get("rope_scaling"):
        where = "rope_scaling"
        settings = settings | _object(raw, where, raw["rope_scaling"])
    key, default = THETA[kind]
    theta = positive(settings, "rope_theta", where=where) if "rope_theta" in settings else positive(raw, key, default)
    if "rope_type" not in settings and settings.get("type", "default") != "default":
        raise InvalidField(f"{where}.type", "expected the name of the rotary embedding under rope_type")
    rope_type = settings.get("rope_type", "default")
    if rope_type not in ("default", "linear"):
        raise InvalidField(
            where, f"only the rotary embeddings default and linear are supported, got {shown(rope_type)}"
        )
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidField(f"{where}.partial_rotary_factor", "a partial rotary embedding is not supported")
    return GemmaRope(theta, positive(settings, "factor", where=where) if rope_type == "linear" else 1.0)


def _object(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise InvalidField(key, f"expected an object or null, got {shown(value)}")
    return value or {}


def build(config: GemmaConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""

    def attention(rope: GemmaRope, window: int) -> Attention:
        return Attention(
            config,
            rope.tables(config.head_dim, max_model_len),
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=True,
            window=window,
            scale=config.query_pre_attn_scalar**-0.5,
            post_norm="post_attention_layernorm",
        )

    kinds = {SLIDING: attention(config.local_rope, config.sliding_window), FULL: attention(config.global_rope, 0)}
    mlp = Mlp(
        config,
        activation=Activation.GELU_TANH,
        norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
    )
    # transformers rounds the scale to the type of the weights: the sqrt of 1152 is 34 in bfloat16.
    scale = widen(in_dtype(np.array([config.hidden_size**0.5], np.float32), ops.dtype))
    return Model(config, ops, (ByLayer([kinds[kind] for kind in config.layer_types]), mlp), float(scale[0]))


ARCHITECTURES = {"Gemma3ForCausalLM": Architecture(read_config, build)}
REFUSED = {
    "Gemma3ForConditionalGeneration": "takes images, which is not supported: save its text model alone, as "
    "Gemma3ForCausalLM"
}
