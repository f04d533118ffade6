"""ERNIE 4.5 with a mixture of experts. Attention and dense layers are those of the dense model."""

from __future__ import annotations

from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import (
    count,
    positive,
    read_common,
    refuse_other_values,
    refuse_rope_scaling,
)
from fastdeploy.model_executor.models.decoder import Attention, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.ernie import MORE_TOKENS, PLAIN_VALUES
from fastdeploy.model_executor.models.experts import Experts, Mixture, MixtureConfig, check_mixture, mlp_or_experts
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.blocks import RouterScore
from fastdeploy.model_executor.ops.interface import Ops

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
# Keys of a mixture, as those of PLAIN_VALUES. With biases Baidu's experts have some, and those of transformers have
# none, so a config with biases is two models.
PLAIN_MIXTURE: dict[str, tuple[Any, ...]] = {
    "use_bias": (False, None),
    "moe_gate_act": ("softmax", None),
    "moe_norm_gate_logits": (True, None),
    "moe_use_aux_free": (True, None),
    "moe_use_hard_gate": (False, None),
    "moe_group_experts": (False, None),
}
KEYS = {"experts": "moe_num_experts", "inner": "moe_intermediate_size", "top_k": "moe_k"}


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> MixtureConfig:
    """See ``Architecture.read_config``."""
    refuse_other_values(raw, PLAIN_VALUES | PLAIN_MIXTURE)
    refuse_rope_scaling(raw)
    raw = DEFAULTS | raw
    common = read_common(raw, generation)
    if isinstance(raw["moe_num_experts"], list):
        raise InvalidField("moe_num_experts", "a list has experts for images, which are not supported")
    inner = count(raw, "moe_intermediate_size")
    mixture = Mixture(
        layers=_experts_layers(raw, common.num_hidden_layers),
        experts=count(raw, "moe_num_experts"),
        inner=inner,
        top_k=count(raw, "moe_k"),
        score=RouterScore.SOFTMAX,
        normalize=True,
        norm_min=positive(raw, "moe_norm_min"),
        shared_inner=inner * count(raw, "moe_num_shared_experts", least=0),
    )
    return MixtureConfig(**vars(common), mixture=check_mixture(mixture, common.hidden_size, KEYS))


def _experts_layers(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers with experts: every moe_layer_interval-th one from moe_layer_start_index to
    moe_layer_end_index, where null and -1 mean the last layer."""
    first, interval = count(raw, "moe_layer_start_index", least=0), count(raw, "moe_layer_interval")
    last = layers - 1
    if raw["moe_layer_end_index"] not in (None, -1):
        last = count(raw, "moe_layer_end_index", least=0)
    found = tuple(layer for layer in range(first, min(last + 1, layers)) if (layer + 1) % interval == 0)
    if not found:
        raise InvalidField("moe_layer_start_index", "no layer has experts: this is a dense model, Ernie4_5ForCausalLM")
    return found


def build(config: MixtureConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len)
    experts = Experts(config, bias="moe_statics.e_score_correction_bias", bias_is_row=True)
    blocks = Attention(config, rope, interleaved=True), mlp_or_experts(experts)
    return Model(config, ops, blocks, ignored=MORE_TOKENS)


ARCHITECTURES = {"Ernie4_5_MoeForCausalLM": Architecture(read_config, build)}
IMAGES = (
    "has experts for images, which are not supported; "
    "of ERNIE 4.5 the models of text are supported (Ernie4_5ForCausalLM, Ernie4_5_MoeForCausalLM)"
)
REFUSED = dict.fromkeys(("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLForConditionalGeneration"), IMAGES)
