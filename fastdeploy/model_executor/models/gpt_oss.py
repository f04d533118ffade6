"""gpt-oss, with weights of bfloat16 or float32. Every layer has a mixture of experts, and every second one attends to
the last tokens only. Each head of attention has a sink, and the rotary embedding is YaRN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.model_executor.model_config import (
    FULL,
    SLIDING,
    count,
    flag,
    layer_kinds,
    read_common,
    refuse_other_values,
)
from fastdeploy.model_executor.models.decoder import YARN, Attention, ByLayer, Yarn, read_yarn, rope_of
from fastdeploy.model_executor.models.experts import Experts, Mixture, MixtureConfig, check_mixture
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.blocks import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, RouterScore
from fastdeploy.model_executor.ops.interface import Ops

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}
ROPE = {
    "rope_type": YARN,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FIXED = {"swiglu_alpha": [SWIGLU_ALPHA], "swiglu_limit": [SWIGLU_LIMIT]}
KEYS = {"experts": "num_local_experts", "inner": "intermediate_size", "top_k": "num_experts_per_tok"}


@dataclass(frozen=True)
class GptOssConfig(MixtureConfig):
    """The config of a gpt-oss model. attention_bias: the four projections of the attention have biases. layer_types:
    of each layer, sliding_attention or full_attention. sliding_window: the tokens that a token of a sliding layer
    attends to, itself included; 0 if no layer slides. yarn: None for the default rotary embedding."""

    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int
    yarn: Yarn | None


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> GptOssConfig:
    """See ``Architecture.read_config``."""
    raw = DEFAULTS | raw
    refuse_other_values(raw, FIXED)
    if not raw.get("rope_scaling") and raw.get("rope_parameters") is None:
        raw = raw | {"rope_parameters": ROPE}
    common = read_common(raw, generation)
    layers = common.num_hidden_layers
    kinds = raw.get("layer_types")
    layer_types = layer_kinds([(SLIDING, FULL)[i % 2] for i in range(layers)] if kinds is None else kinds, layers)
    mixture = Mixture(
        layers=tuple(range(layers)),
        experts=count(raw, "num_local_experts"),
        inner=common.intermediate_size,
        top_k=count(raw, "num_experts_per_tok"),
        score=RouterScore.SOFTMAX_OF_CHOSEN,
    )
    return GptOssConfig(
        **vars(common),
        attention_bias=flag(raw, "attention_bias"),
        layer_types=layer_types,
        sliding_window=count(raw, "sliding_window") if SLIDING in layer_types else 0,
        yarn=read_yarn(raw),
        mixture=check_mixture(mixture, common.hidden_size, KEYS),
    )


def build(config: GptOssConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    bias = config.attention_bias
    rope = rope_of(config.head_dim, config.rope_theta, config.yarn, max_model_len)
    windows = {SLIDING: config.sliding_window, FULL: 0}
    kinds = {kind: Attention(config, rope, bias, bias, window=size, sinks=True) for kind, size in windows.items()}
    experts = Experts(config, "router", router_bias=True, activation=Activation.SWIGLU_CLAMPED, fused=True)
    return Model(config, ops, (ByLayer([kinds[kind] for kind in config.layer_types]), experts))


ARCHITECTURES = {"GptOssForCausalLM": Architecture(read_config, build)}
