"""DeepSeek-V3 and DeepSeek-V2: latent attention, dense layers first, then layers with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.model_executor.model_config import MAX_LAYERS, count, flag, read_common, refuse_other_values
from fastdeploy.model_executor.models.decoder import Yarn, read_yarn, rope_of, yarn_scale
from fastdeploy.model_executor.models.experts import Experts, MixtureConfig, layers_behind, mlp_or_experts, read_mixture
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.models.latent_attention import Latent, LatentAttention, read_latent
from fastdeploy.model_executor.ops.blocks import RouterScore
from fastdeploy.model_executor.ops.interface import Ops

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
DEFAULTS = {
    V2: {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
    },
    V3: {
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}
SCORES = {V2: RouterScore.SOFTMAX, V3: RouterScore.SIGMOID}
# Keys of which one value is supported: that with which transformers computes if it does not read the key.
FIXED: dict[str, dict[str, list[Any]]] = {
    V2: {"moe_layer_freq": [1], "norm_topk_prob": [False], "scoring_func": ["softmax"], "topk_method": ["greedy"]},
    V3: {"moe_layer_freq": [1], "scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]},
}


@dataclass(frozen=True)
class DeepseekConfig(MixtureConfig):
    """The config of a DeepSeek model. num_key_value_heads and head_dim are those of the KV cache: one key for all
    heads. attention_bias: see ``LatentAttention.bias``. yarn: None for the default rotary embedding. more_layers:
    layers of a checkpoint behind those of the model. They predict further tokens and are not used here."""

    keys_only: ClassVar[bool] = True

    latent: Latent
    yarn: Yarn | None
    rope_interleave: bool
    attention_bias: bool
    more_layers: int


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> DeepseekConfig:
    """See ``Architecture.read_config``."""
    architecture = raw["architectures"][0]
    raw = DEFAULTS[architecture] | raw
    refuse_other_values(raw, FIXED[architecture])
    heads = count(raw, "num_attention_heads")
    if raw.get("num_key_value_heads") not in (None, heads):
        text = f"expected {heads}, as num_attention_heads, got {shown(raw['num_key_value_heads'])}"
        raise InvalidField("num_key_value_heads", text)
    if architecture == V2:
        raw |= {"n_group": 1, "topk_group": 1}  # the method greedy has no groups, whatever the keys say
        if flag(raw, "mlp_bias"):
            raise InvalidField("mlp_bias", "biases in the MLPs of DeepSeek are not supported")
    latent = read_latent(raw)
    # head_dim of config.json is the rotary part alone.
    common = read_common(raw | {"num_key_value_heads": 1, "head_dim": latent.key_dim}, generation)
    return DeepseekConfig(
        **vars(common),
        latent=latent,
        mixture=read_mixture(raw, common, SCORES[architecture]),
        yarn=read_yarn(raw),
        rope_interleave=architecture == V2 or flag(raw, "rope_interleave"),
        attention_bias=flag(raw, "attention_bias"),
        more_layers=count(raw, "num_nextn_predict_layers", least=0, most=MAX_LAYERS),
    )


def build(config: DeepseekConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    latent, yarn = config.latent, config.yarn
    scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_scale(yarn.factor, yarn.mscale_all_dim) ** 2
    rope = rope_of(latent.qk_rope_head_dim, config.rope_theta, yarn, max_model_len)
    attention = LatentAttention(config, latent, rope, scale, config.attention_bias, config.rope_interleave)
    bias = "gate.e_score_correction_bias" if config.architecture == V3 else ""
    mlps = mlp_or_experts(Experts(config, bias=bias))
    return Model(config, ops, (attention, mlps), ignored=layers_behind(config, config.more_layers))


ARCHITECTURES = {name: Architecture(read_config, build) for name in (V2, V3)}
REFUSED = {"DeepseekV32ForCausalLM": "has sparse attention; of DeepSeek only V3 and V2-Lite are supported"}
