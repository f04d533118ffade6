"""Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.model_executor.model_config import count, flag, read_common, refuse_rope_scaling
from fastdeploy.model_executor.models.decoder import Attention, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.experts import Experts, Mixture, MixtureConfig, check_mixture, mlp_or_experts
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.models.qwen import refuse_sliding_windows
from fastdeploy.model_executor.ops.blocks import RouterScore
from fastdeploy.model_executor.ops.interface import Ops

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
KEYS = {"experts": "num_experts", "inner": "moe_intermediate_size", "top_k": "num_experts_per_tok"}


@dataclass(frozen=True)
class QwenMoeConfig(MixtureConfig):
    """The config of a Qwen3 model with experts. attention_bias: all linears of attention have biases."""

    attention_bias: bool


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> QwenMoeConfig:
    """See ``Architecture.read_config``."""
    if "num_local_experts" in raw:  # the name under which transformers stores it
        raw = {"num_experts": raw["num_local_experts"]} | raw
    raw = DEFAULTS | raw
    common = read_common(raw, generation)
    refuse_sliding_windows(raw, common.num_hidden_layers)
    refuse_rope_scaling(raw)
    mixture = Mixture(
        layers=_experts_layers(raw, common.num_hidden_layers),
        experts=count(raw, "num_experts"),
        inner=count(raw, "moe_intermediate_size"),
        top_k=count(raw, "num_experts_per_tok"),
        score=RouterScore.SOFTMAX,
        normalize=flag(raw, "norm_topk_prob"),
    )
    attention_bias = flag(raw, "attention_bias")
    return QwenMoeConfig(
        **vars(common), attention_bias=attention_bias, mixture=check_mixture(mixture, common.hidden_size, KEYS)
    )


def _experts_layers(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers with experts: every decoder_sparse_step-th one that mlp_only_layers does not name."""
    step, dense = count(raw, "decoder_sparse_step"), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise InvalidField("mlp_only_layers", f"expected a list of layers from 0 to {layers - 1}, got {shown(dense)}")
    found = tuple(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
    if not found:
        raise InvalidField("mlp_only_layers", "no layer has experts: this is a dense model, Qwen3ForCausalLM")
    return found


def build(config: QwenMoeConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope, bias = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len), config.attention_bias
    mlps = mlp_or_experts(Experts(config))
    return Model(config, ops, (Attention(config, rope, bias, bias, qk_norm=True), mlps))


ARCHITECTURES = {"Qwen3MoeForCausalLM": Architecture(read_config, build)}
