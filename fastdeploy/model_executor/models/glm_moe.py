"""GLM-4.5: layers with a mixture of experts behind the first layers, which are dense. Attention rotates a part of each
head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import (
    MAX_LAYERS,
    count,
    flag,
    positive,
    read_common,
    refuse_rope_scaling,
    rope_settings,
)
from fastdeploy.model_executor.models.decoder import Attention, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.experts import Experts, MixtureConfig, layers_behind, mlp_or_experts, read_mixture
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.blocks import RouterScore
from fastdeploy.model_executor.ops.interface import Ops

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True)
class GlmMoeConfig(MixtureConfig):
    """The config of a GLM-4.5 model. attention_bias: q, k and v have biases. qk_norm: q and k have an RMSNorm per head.
    rotary_dim: how many dimensions of a head are rotated. more_layers: layers of a checkpoint behind those of the
    model. They predict further tokens and are not used here."""

    attention_bias: bool
    qk_norm: bool
    rotary_dim: int
    more_layers: int


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> GlmMoeConfig:
    """See ``Architecture.read_config``."""
    raw = DEFAULTS | raw
    common = read_common(raw, generation)
    refuse_rope_scaling(raw, partial=True)
    return GlmMoeConfig(
        **vars(common),
        attention_bias=flag(raw, "attention_bias"),
        qk_norm=flag(raw, "use_qk_norm"),
        rotary_dim=_rotary_dim(raw, common.head_dim),
        more_layers=count(raw, "num_nextn_predict_layers", least=0, most=MAX_LAYERS),
        mixture=read_mixture(raw, common, RouterScore.SIGMOID),
    )


def _rotary_dim(raw: dict[str, Any], head_dim: int) -> int:
    """Return how many dimensions of a head are rotated: the part that partial_rotary_factor says, rounded down."""
    key, rope = rope_settings(raw)
    where = key if "partial_rotary_factor" in rope else ""
    factor = positive(rope if where else raw, "partial_rotary_factor", where=where)
    rotated = int(head_dim * factor)
    if rotated % 2 or not 0 < rotated <= head_dim:
        field = f"{where}.partial_rotary_factor" if where else "partial_rotary_factor"
        raise InvalidField(field, f"expected an even part of {head_dim} (head_dim), got {factor:g}")
    return rotated


def build(config: GlmMoeConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.rotary_dim, config.rope_theta), max_model_len)
    attention = Attention(config, rope, qkv_bias=config.attention_bias, qk_norm=config.qk_norm)
    mlps = mlp_or_experts(Experts(config, bias="gate.e_score_correction_bias"))
    return Model(config, ops, (attention, mlps), ignored=layers_behind(config, config.more_layers))


ARCHITECTURES = {"Glm4MoeForCausalLM": Architecture(read_config, build)}
OTHER = "; of GLM only Glm4MoeForCausalLM is supported (GLM-4.5, GLM-4.6 and GLM-4.7)"
REFUSED = {
    "Glm4ForCausalLM": "has norms at other places and a rotary embedding of neighbouring dimensions" + OTHER,
    "GlmForCausalLM": "has a rotary embedding of neighbouring dimensions" + OTHER,
    "Glm4MoeLiteForCausalLM": "has multi-head latent attention" + OTHER,
    "GlmMoeDsaForCausalLM": "has sparse attention" + OTHER,
    "Glm4vMoeForConditionalGeneration": "reads images, which is not supported; save its text model alone" + OTHER,
}
