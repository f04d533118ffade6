"""A config key that changes the result is used or refused by name, never ignored."""

from __future__ import annotations

import json
import os

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.models import MAX_CONFIG_BYTES, load_config, parse_config
from fastdeploy.testing.checkpoints import config_json
from support.specs import SPECS

QWEN2, QWEN3 = config_json(SPECS["qwen2_tied"]), config_json(SPECS["qwen3"])
LLAMA, ERNIE = config_json(SPECS["llama"]), config_json(SPECS["ernie"])
ERNIE_MOE, GLM = config_json(SPECS["ernie_moe"]), config_json(SPECS["glm_moe"])
MISTRAL, GEMMA, GEMMA_NEW = (config_json(SPECS[name]) for name in ("mistral", "gemma", "gemma_biased"))
ROPE = LLAMA["rope_scaling"]


def refused_key(raw: dict) -> str:
    """Return the key of the config that is refused."""
    with pytest.raises(InvalidField) as error:
        parse_config(raw)
    assert len(error.value.message) <= 800
    return error.value.field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 128}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 2}, "layer_types"),
        ({"max_window_layers": "all"}, "max_window_layers"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": "many"}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_mrope": True}, "use_mrope"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_an_unsupported_value_is_refused_by_key(changes, field):
    assert refused_key(QWEN3 | changes) == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": ROPE | {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {key: ROPE[key] for key in ROPE if key != "factor"}}, "rope_scaling.factor"),
        ({"rope_scaling": ROPE | {"low_freq_factor": "1"}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": ROPE | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        (
            {"rope_scaling": None, "rope_parameters": ROPE | {"original_max_position_embeddings": 0.5}},
            "rope_parameters.original_max_position_embeddings",
        ),
        ({"original_max_position_embeddings": "8192"}, "rope_scaling.original_max_position_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "no"}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_an_unsupported_value_of_llama_is_refused_by_key(changes, field):
    assert refused_key(LLAMA | changes) == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_bias": "no"}, "use_bias"),
        ({"moe_num_experts": 64}, "moe_num_experts"),
        ({"compression_ratio": 4}, "compression_ratio"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_an_unsupported_value_of_ernie_is_refused_by_key(changes, field):
    assert refused_key(ERNIE | changes) == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_bias": True}, "use_bias"),
        ({"moe_gate_act": "sigmoid"}, "moe_gate_act"),
        ({"moe_use_aux_free": False}, "moe_use_aux_free"),
        ({"moe_norm_gate_logits": False}, "moe_norm_gate_logits"),
        ({"moe_num_experts": [64, 64]}, "moe_num_experts"),
        ({"moe_num_experts": 0}, "moe_num_experts"),
        ({"moe_intermediate_size": [1536, 512]}, "moe_intermediate_size"),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size"),
        ({"moe_k": 7}, "moe_k"),
        ({"moe_num_shared_experts": -1}, "moe_num_shared_experts"),
        ({"moe_layer_start_index": 3}, "moe_layer_start_index"),
        ({"moe_layer_start_index": [1, 1]}, "moe_layer_start_index"),
        ({"moe_layer_end_index": "last"}, "moe_layer_end_index"),
        ({"moe_layer_interval": 0}, "moe_layer_interval"),
        ({"moe_norm_min": 0}, "moe_norm_min"),
        ({"compression_ratio": 4}, "compression_ratio"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}, "architectures"),
    ],
)
def test_an_unsupported_value_of_a_mixture_of_ernie_is_refused_by_key(changes, field):
    assert refused_key(ERNIE_MOE | changes) == field


def test_a_mixture_of_ernie_has_the_defaults_of_transformers():
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    raw = {key: ERNIE_MOE[key] for key in kept} | {"num_hidden_layers": 8}
    config, of = parse_config(raw), parse_config(raw).mixture
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 131072)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (5e5, 1e-5, True)
    assert (of.experts, of.top_k, of.inner, of.shared_inner, of.norm_min) == (64, 6, 1536, 2 * 1536, 1e-12)
    assert of.layers == tuple(range(1, 8))
    chosen = {"moe_layer_start_index": 2, "moe_layer_end_index": 6, "moe_layer_interval": 2}
    assert parse_config(raw | chosen).mixture.layers == (3, 5)
    assert parse_config(raw | {"moe_layer_end_index": None, "moe_num_shared_experts": 0}).mixture.shared_inner == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention_bias": 1}, "attention_bias"),
        ({"use_qk_norm": "yes"}, "use_qk_norm"),
        ({"partial_rotary_factor": 0.55}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": -0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"n_routed_experts": 0}, "n_routed_experts"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size"),
        ({"n_shared_experts": None}, "n_shared_experts"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"]}, "architectures"),
        ({"architectures": ["Glm4vMoeForConditionalGeneration"]}, "architectures"),
    ],
)
def test_an_unsupported_value_of_glm_is_refused_by_key(changes, field):
    assert refused_key(GLM | changes) == field


def test_glm_has_the_defaults_of_transformers():
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    raw = {key: GLM[key] for key in kept} | {"num_hidden_layers": 4, "num_attention_heads": 8}
    config, of = parse_config(raw), parse_config(raw).mixture
    assert (config.num_key_value_heads, config.max_position_embeddings, config.rope_theta) == (8, 131072, 10000.0)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.attention_bias) == (1e-5, False, False)
    assert (config.qk_norm, config.rotary_dim, config.more_layers) == (False, 12, 1)
    assert (of.layers, of.experts, of.top_k, of.inner, of.shared_inner) == ((1, 2, 3), 128, 8, 1408, 1408)
    assert (of.groups, of.top_groups, of.normalize, of.scale) == (1, 1, True, 1.0)
    whole = parse_config(raw | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}})
    assert whole.rotary_dim == 24 and config.first_difference(whole) == "rotary_dim"


def test_ernie_has_the_defaults_of_transformers_and_two_names():
    keys = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings", "use_bias")
    raw = {key: ERNIE[key] for key in ERNIE if key not in (*keys, "tie_word_embeddings")}
    config = parse_config(raw)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (2, 128, 131072)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (5e5, 1e-5, True)
    assert parse_config(raw | {"architectures": ["Ernie4_5_ForCausalLM"]}) == config


def test_llama_has_the_defaults_of_transformers():
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_theta", "max_position_embeddings")
    config = parse_config({key: LLAMA[key] for key in LLAMA if key not in keys})
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.rope, config.rope_theta) == (None, 10000.0)
    other = parse_config(LLAMA | {"rope_scaling": ROPE | {"factor": 9.0}})
    assert parse_config(LLAMA).first_difference(other) == "rope.factor"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "4096"}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_an_unsupported_value_of_mistral_is_refused_by_key(changes, field):
    assert refused_key(MISTRAL | changes) == field


def test_mistral_has_the_defaults_of_transformers():
    keys = ("num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings", "eos_token_id")
    raw = {key: MISTRAL[key] for key in MISTRAL if key not in keys} | {"num_attention_heads": 16}
    config = parse_config(raw)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (8, 4, 131072)
    assert (config.sliding_window, config.eos_token_ids) == (4096, (2,))
    everything = parse_config(raw | {"sliding_window": None})
    assert everything.sliding_window is None and config.first_difference(everything) == "sliding_window"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"hidden_activation": None}, "hidden_activation"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": [["full_attention"], "full_attention"]}, "layer_types"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_local_base_freq": "10000"}, "rope_local_base_freq"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"full_attention": [1]}}, "rope_parameters.full_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "llama3", "factor": 8.0}}},
            "rope_parameters.sliding_attention",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor",
        ),
    ],
)
def test_an_unsupported_value_of_gemma_is_refused_by_key(changes, field):
    assert refused_key(GEMMA | changes) == field


def test_gemma_with_images_is_refused_with_what_to_do():
    with pytest.raises(InvalidField, match="save its text model alone, as Gemma3ForCausalLM"):
        parse_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA})


def test_gemma_has_the_defaults_of_transformers():
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    config = parse_config({key: GEMMA[key] for key in kept} | {"num_hidden_layers": 7})
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (256, 4, 131072)
    assert (config.query_pre_attn_scalar, config.sliding_window, config.tie_word_embeddings) == (256, 4096, True)
    assert config.layer_types == (*["sliding_attention"] * 5, "full_attention", "sliding_attention")
    assert (config.local_rope, config.global_rope) == ((10000.0, 1.0), (1000000.0, 1.0))
    assert (config.eos_token_ids, config.attention_bias) == ((1,), False)


def test_gemma_reads_the_older_and_the_newer_keys_of_its_layers_and_rotary_embeddings():
    older, newer = parse_config(GEMMA), parse_config(GEMMA_NEW)
    assert older.layer_types == ("sliding_attention", "full_attention")
    assert (older.local_rope, older.global_rope) == ((1000.0, 1.0), (100000.0, 4.0))
    assert newer.layer_types == ("full_attention", "sliding_attention", "sliding_attention")
    assert (newer.local_rope, newer.global_rope) == ((500.0, 1.0), (50000.0, 2.0))
    for key in ("sliding_window", "query_pre_attn_scalar"):
        assert older.first_difference(parse_config(GEMMA | {key: GEMMA[key] + 1})) == key


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads", "architectures"]
)
def test_a_missing_key_is_named(key):
    assert refused_key({k: v for k, v in QWEN3.items() if k != key}) == key


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_settings_without_effect_are_accepted(changes):
    assert parse_config(QWEN3 | changes).num_hidden_layers == 2


def test_rope_theta_is_found_in_both_places():
    assert parse_config(QWEN3).rope_theta == 5e5
    older = {k: v for k, v in QWEN3.items() if k != "rope_parameters"}
    assert parse_config(older | {"rope_theta": 1000000}).rope_theta == 1e6
    assert parse_config(older).rope_theta == 10000.0


def test_head_dim_has_the_defaults_of_transformers():
    assert parse_config(QWEN2).head_dim == 64 // 4
    assert parse_config({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128
    assert parse_config(QWEN3 | {"head_dim": 32}).head_dim == 32


def test_biases_and_norms_follow_the_architecture():
    qwen2, qwen3 = parse_config(QWEN2), parse_config(QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    biased = parse_config(QWEN3 | {"attention_bias": True})
    assert biased.qkv_bias and biased.o_bias


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(7, None, (7,)), ([7, 8], None, (7, 8)), (7, {"eos_token_id": [9, 7, 9]}, (9, 7)), (7, {"eos_token_id": 0}, (0,)),
     (7, {"eos_token_id": None}, (7,)), (None, {}, ())],
)  # fmt: skip
def test_eos_comes_from_the_generation_config_first(config, generation, expected):
    assert parse_config(QWEN3 | {"eos_token_id": config}, generation).eos_token_ids == expected


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path):
    with pytest.raises(InvalidField) as error:
        load_config(tmp_path)
    assert error.value.field == "config.json"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidField) as error:
        load_config(tmp_path)
    assert error.value.field == "generation_config.json"


def test_first_difference_names_a_key_that_changes_the_model_and_ignores_labels():
    config = parse_config(QWEN3)
    assert config.first_difference(parse_config(QWEN3 | {"eos_token_id": 5, "torch_dtype": "bfloat16"})) is None
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"):
        assert config.first_difference(parse_config(QWEN3 | {key: QWEN3[key] * 2})) == key


@pytest.mark.parametrize("value", [2**31, 10**400, 0, -1, True, 1.0, "2", None])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_key_value_heads"])
def test_an_impossible_size_is_refused_by_key(key, value):
    # null for num_key_value_heads means num_attention_heads
    assert (key, value) == ("num_key_value_heads", None) or refused_key(QWEN3 | {key: value}) == key


def test_layer_types_of_another_number_of_layers_are_refused():
    assert refused_key(QWEN3 | {"num_hidden_layers": 3, "layer_types": ["full_attention"]}) == "layer_types"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, 1e300, 0, -1.0, True])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_outside_the_range_of_float_arithmetic_is_refused_by_key(key, value):
    assert refused_key({k: v for k, v in QWEN3.items() if k != "rope_parameters"} | {key: value}) == key


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "large", "folder"])
def test_a_file_that_may_not_be_read_is_named_and_not_waited_for(name, kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b" " * MAX_CONFIG_BYTES + b"{}")
    with pytest.raises(InvalidField) as error:
        load_config(tmp_path)
    assert error.value.field == name


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [("num_experts_per_tok", 2, "mixture.top_k"), ("routed_scaling_factor", 2.5, "mixture.scale"),
     ("v_head_dim", 32, "latent.v_head_dim"), ("rope_scaling", None, "yarn"), ("num_nextn_predict_layers", 0, None)],
)  # fmt: skip
def test_the_difference_of_two_mixtures_is_one_of_their_fields(key, value, found):
    """The layers that predict further tokens are ignored, so weights without them are of use."""
    raw = config_json(SPECS["deepseek"])
    assert parse_config(raw).first_difference(parse_config(raw | {key: value})) == found
