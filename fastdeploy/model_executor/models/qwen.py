"""Qwen2, Qwen2.5 and Qwen3 (dense). Qwen2 has biases on q, k and v; Qwen3 has an RMSNorm of each head of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.model_executor.model_config import FULL, ModelConfig, flag, read_common, refuse_rope_scaling
from fastdeploy.model_executor.models.decoder import Attention, Mlp, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.interface import Ops


@dataclass(frozen=True)
class QwenConfig(ModelConfig):
    """The config of a Qwen model. qkv_bias: the q, k and v projections have biases; o_bias: the output projection has
    one. qk_norm: q and k have an RMSNorm per head."""

    qkv_bias: bool
    o_bias: bool
    qk_norm: bool


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> QwenConfig:
    """See ``Architecture.read_config``."""
    qwen3 = raw["architectures"] == ["Qwen3ForCausalLM"]
    defaults = {"max_position_embeddings": 32768} | ({"head_dim": 128} if qwen3 else {})
    common = read_common(defaults | raw, generation)
    refuse_sliding_windows(raw, common.num_hidden_layers)
    if raw.get("use_mrope"):
        raise InvalidField("use_mrope", "multimodal rotary embedding is not supported")
    refuse_rope_scaling(raw)
    bias = qwen3 and flag(raw, "attention_bias")
    return QwenConfig(**vars(common), qkv_bias=not qwen3 or bias, o_bias=bias, qk_norm=qwen3)


def refuse_sliding_windows(raw: dict[str, Any], layers: int) -> None:
    """Raise InvalidField if any of ``layers`` layers has a sliding window."""
    layer_types = raw.get("layer_types")
    if layer_types not in (None, [FULL] * layers):
        raise InvalidField("layer_types", f"expected {FULL} for each of num_hidden_layers")
    slides = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    first_sliding = raw.get("max_window_layers", 28)
    if type(first_sliding) is not int:
        raise InvalidField("max_window_layers", f"expected an integer, got {shown(first_sliding)}")
    if slides and layer_types is None and first_sliding < layers:
        raise InvalidField("use_sliding_window", "sliding window attention is not supported")


def build(config: QwenConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len)
    attention = Attention(config, rope, config.qkv_bias, config.o_bias, config.qk_norm)
    return Model(config, ops, (attention, Mlp(config)))


ARCHITECTURES = dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), Architecture(read_config, build))
