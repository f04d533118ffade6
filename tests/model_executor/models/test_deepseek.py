"""The configs of DeepSeek-V3 and DeepSeek-V2: what is read, and what is refused by its name."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.models import build_model, parse_config
from fastdeploy.model_executor.models.decoder import yarn_frequencies
from fastdeploy.model_executor.models.interface import new_kv_cache
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.checkpoints import config_json
from support.specs import SPECS

V3, V2 = config_json(SPECS["deepseek"]), config_json(SPECS["deepseek_v2"])
# The config of DeepSeek-V3, but for its 8-bit weights.
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"kv_lora_rank": 40}, "kv_lora_rank"),
        ({"kv_lora_rank": 576}, "kv_lora_rank"),
        ({"qk_nope_head_dim": 24}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
        ({"v_head_dim": 20}, "v_head_dim"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"rope_interleave": "yes"}, "rope_interleave"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_an_unsupported_value_is_refused_by_key(changes, field):
    with pytest.raises(InvalidField) as error:
        parse_config(V3 | changes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_an_unsupported_value_of_v2_is_refused_by_key(changes, field):
    with pytest.raises(InvalidField) as error:
        parse_config(V2 | changes)
    assert error.value.field == field


def test_deepseek_v3_has_the_defaults_of_transformers_and_one_small_key_for_each_token():
    config = parse_config(PUBLISHED)
    assert config.latent == (1536, 512, 128, 64, 128) and config.eos_token_ids == (1,)
    mixture = config.mixture
    assert mixture.layers == tuple(range(3, 61)) and (mixture.experts, mixture.top_k, mixture.inner) == (256, 8, 2048)
    assert (mixture.groups, mixture.top_groups, mixture.scale, mixture.normalize) == (8, 4, 2.5, True)
    assert mixture.shared_inner == 2048 and config.rope_interleave and not config.attention_bias
    cache = new_kv_cache(ReferenceOps("float32"), config, num_blocks=1, block_size=16)
    assert cache.nbytes == 61 * 16 * 576 * 4


def test_yarn_leaves_short_waves_alone_and_divides_long_ones():
    """Of the 32 pairs of DeepSeek-V3, whose context of 4,096 tokens became 40 times as long."""
    config = parse_config(PUBLISHED)
    found, plain = yarn_frequencies(64, config.rope_theta, config.yarn), 10000.0 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(found[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(found[23:], plain[23:] / 40, rtol=1e-6)
    assert (found[11:23] < plain[11:23]).all() and (found[11:23] > plain[11:23] / 40).all()
    assert (config.yarn.attention_factor, config.yarn.mscale_all_dim) == (1.0, 1.0)


def test_tensors_of_the_layer_that_predicts_further_tokens_are_ignored():
    model = build_model(parse_config(V3 | {"num_nextn_predict_layers": 1}), ReferenceOps("float32"), 2)
    assert model.ignored == ("model.layers.3.",)


def test_the_choice_of_v2_has_no_groups_whatever_the_keys_say():
    of = parse_config(V2 | {"n_group": 8, "topk_group": None}).mixture
    assert (of.groups, of.top_groups) == (1, 1)
