"""The config of gpt-oss, and the names of its tensors."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.models import build_model, parse_config
from fastdeploy.model_executor.models.decoder import read_yarn, rope_frequencies, yarn_frequencies
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.checkpoints import config_json, random_tensors
from support.specs import SPECS, YARN_ROPE

GPT_OSS = config_json(SPECS["gpt_oss"])
PLAIN = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "rope_theta")}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_size": 88}, "hidden_size"),
        ({"intermediate_size": 40}, "intermediate_size"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": YARN_ROPE | {"factor": None}}, "rope_scaling.factor"),
        ({"rope_scaling": YARN_ROPE | {"beta_fast": 0.5}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": YARN_ROPE | {"truncate": "no"}}, "rope_scaling.truncate"),
        ({"rope_scaling": YARN_ROPE | {"attention_factor": -1}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": YARN_ROPE | {"mscale": "1", "mscale_all_dim": 1}}, "rope_scaling.mscale"),
        (
            {"rope_scaling": YARN_ROPE | {"original_max_position_embeddings": 0}},
            "rope_scaling.original_max_position_embeddings",
        ),
    ],
)
def test_an_unsupported_value_of_gpt_oss_is_refused_by_key(changes, field):
    with pytest.raises(InvalidField) as error:
        parse_config(GPT_OSS | changes)
    assert error.value.field == field


def test_a_checkpoint_in_mxfp4_is_refused_with_what_to_do():
    with pytest.raises(InvalidField, match=r"got 'mxfp4': dequantize the weights, and save the model in bfloat16"):
        parse_config(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}})


def test_gpt_oss_has_the_defaults_of_transformers():
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    config = parse_config({key: GPT_OSS[key] for key in kept} | {"num_hidden_layers": 3, "num_attention_heads": 16})
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (64, 8, 131072)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 150000.0, False)
    assert (config.mixture.experts, config.mixture.top_k, config.mixture.layers) == (128, 4, (0, 1, 2))
    assert config.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert (config.sliding_window, config.attention_bias) == (128, True)
    assert config.yarn == (32.0, 32.0, 1.0, 4096, False, 0.1 * np.log(32) + 1, 0.0)


def test_the_default_rotary_embedding_and_layers_without_a_window_are_read():
    rope = {"rope_type": "default", "rope_theta": 9e4}
    config = parse_config(PLAIN | {"rope_parameters": rope, "layer_types": ["full_attention"] * 3})
    assert (config.yarn, config.rope_theta, config.sliding_window) == (None, 9e4, 0)
    assert config.first_difference(parse_config(GPT_OSS)) == "rope_theta"


def test_the_attention_factor_of_yarn_is_that_of_the_config_or_follows_from_it():
    def factor(**more: object) -> float:
        raw = {"max_position_embeddings": 512, "rope_scaling": YARN_ROPE | more}
        yarn = read_yarn(raw)
        assert yarn is not None
        return yarn.attention_factor

    assert factor() == pytest.approx(1 + 0.1 * np.log(8))
    assert factor(attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0) == 1.5
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx((1 + 0.2 * np.log(8)) / (1 + 0.1 * np.log(8)))
    assert factor(mscale=2.0) == factor(mscale=2.0, mscale_all_dim=0) == factor()
    assert factor(factor=1.0) == 1.0


def test_yarn_keeps_short_waves_and_divides_long_ones():
    """The oracle of transformers is in the tests of the runner; these are the ends of the ramp."""
    yarn = read_yarn({"max_position_embeddings": 131072, "rope_scaling": YARN_ROPE | {"truncate": True}})
    plain, found = rope_frequencies(64, 150000.0), yarn_frequencies(64, 150000.0, yarn)
    waves = 64 * plain / (2 * np.pi)  # periods in the original context
    np.testing.assert_array_equal(found[waves > 8], plain[waves > 8])
    np.testing.assert_allclose(found[waves < 0.5], plain[waves < 0.5] / 8, rtol=1e-6)


def test_a_base_of_yarn_that_has_no_long_waves_is_refused():
    with pytest.raises(InvalidField, match="rope_theta"):
        build_model(parse_config(GPT_OSS | {"rope_theta": 1.0}), ReferenceOps("float32"), 64)


def test_the_tensors_have_the_names_and_shapes_of_the_checkpoint():
    model = build_model(parse_config(GPT_OSS), ReferenceOps("float32"), 64)
    shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
    assert shapes == {name: array.shape for name, array in random_tensors(SPECS["gpt_oss"]).items()}
