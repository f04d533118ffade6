"""Configs with values that no tool writes: each is accepted, or refused by the name of its field or file, and nothing
else is raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import ANYWHERE, Folder
from fastdeploy.core.weight_source import ADAPTER_CONFIG
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.model_executor import lora_config
from fastdeploy.model_executor.lora import _parse_config
from fastdeploy.model_executor.lora_config import Modules, read_lora_config
from fastdeploy.model_executor.models import load_config, parse_config, read_eos_token_ids
from fastdeploy.testing.checkpoints import config_json
from support.specs import SPECS

HUGE = "9" * 5000
ODD = [
    "null", "true", "0", "-1", "1", "1.5", "-0.0", "1e300", "5e-324", "1e400", "NaN", "-Infinity", "9" * 30, HUGE,
    f"-{HUGE}", f"[{HUGE}]", f'{{"a": {HUGE}}}', '""', '"\\ud800"', '"a\\u0000b"', f'"{"x" * 300}"', "[]", "{}",
    "[null]", '["\\ud800"]', "[[]]",
    "[{}]", '{"": 1}', '{"\\ud800": 1}', '{"q_proj": 1e400}', "[" * 900 + "]" * 900,
    '{"a": ' * 900 + "1" + "}" * 900, '"\\\\"', '"(?P<idx>a"', "[1, 2", "\\",
]  # fmt: skip
MODEL = json.loads((Path(MODEL_DIR) / "config.json").read_text())
MODEL_KEYS = sorted(MODEL.keys() | {
    "architectures", "attention_bias", "attn_logit_softcapping", "dtype", "eos_token_id", "final_logit_softcapping",
    "head_dim", "hidden_act", "hidden_activation", "layer_types", "max_window_layers", "mlp_bias",
    "num_experts_per_tok", "num_local_experts", "swiglu_alpha", "swiglu_limit",
    "original_max_position_embeddings", "quantization_config", "query_pre_attn_scalar", "rope_local_base_freq",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "sliding_window_pattern", "tie_word_embeddings",
    "torch_dtype", "use_bidirectional_attention", "use_mrope", "use_sliding_window",
})  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 1e4, "partial_rotary_factor": 1.0, "type": "llama3"}
LORA = {"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [0]}
LORA_KEYS = sorted(
    {*lora_config._Fields.__struct_fields__, *lora_config.SUPPORTED, "lora_dropout", "a_field_of_tomorrow"}
)
MODULES = Modules(("model.layers.0.self_attn.q_proj", "lm_head"), "lm_head", ("model.norm",))


def with_value(fields: dict, key: str, text: str) -> bytes:
    """Return ``fields`` as JSON, with ``text`` in the place of the value of ``key``."""
    rest = "".join(f", {json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items() if k != key)
    return f"{{{json.dumps(key)}: {text}{rest}}}".encode()


def refused_field(folder: Path, config: bytes) -> str | None:
    """Return the field of the refusal of config.json, or None."""
    (folder / "config.json").write_bytes(config)
    try:
        load_config(folder)
    except InvalidField as error:
        assert error.message.startswith(error.field)
        return error.field
    return None


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        pytest.param("Qwen3ForCausalLM", marks=pytest.mark.slow),
        pytest.param("Ernie4_5ForCausalLM", marks=pytest.mark.slow),
        "MistralForCausalLM",
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
    ],
)
def test_an_odd_value_in_config_json_is_refused_by_the_name_of_its_key(tmp_path, architecture):
    model = MODEL | {"architectures": [architecture]}
    if architecture == "GptOssForCausalLM":
        model |= {"sliding_window": 64}
    for key in MODEL_KEYS:
        for text in ODD:
            field = refused_field(tmp_path, with_value(model, key, text))
            assert field is None or field.partition(".")[0] in ("config", *MODEL_KEYS), key
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "rope_theta"):
        for text in (HUGE, f"[{HUGE}]", "[" * 900 + "]" * 900):
            assert refused_field(tmp_path, with_value(model, key, text)) == key
    for rope in ("rope_scaling", "rope_parameters"):
        for key in LLAMA3:
            for text in ODD:
                inner = with_value(LLAMA3, key, text).decode()
                field = refused_field(tmp_path, with_value(model, rope, inner)) or rope
                assert field == "config.json" or field.partition(".")[0] == rope


LISTS = [(name, "num_hidden_layers") for name in ("qwen3_moe", "ernie_moe", "glm_moe", "deepseek", "gpt_oss")]


@pytest.mark.parametrize(
    ("name", "key"), [*LISTS, *((name, "num_nextn_predict_layers") for name in ("glm_moe", "deepseek"))]
)
def test_more_layers_than_a_list_may_have_are_refused_by_name(name, key):
    """A config comes with an update, too: it must not fill the memory of a server."""
    with pytest.raises(InvalidField, match=f"{key}: expected an integer from . to 16384, got 16385"):
        parse_config(config_json(SPECS[name]) | {key: 16385})


def test_a_value_that_cannot_be_shown_is_refused_by_the_name_of_its_key():
    deep: list = []
    for _ in range(5000):  # too deep for ``repr``
        deep = [deep]
    for key in ("vocab_size", "hidden_act", "torch_dtype", "rope_theta", "rope_scaling", "eos_token_id"):
        with pytest.raises(InvalidField) as error:
            parse_config(MODEL | {key: deep})
        assert error.value.field == key


def test_odd_eos_ids_are_refused_by_name(tmp_path):
    for text in ODD:
        (tmp_path / "generation_config.json").write_bytes(with_value({}, "eos_token_id", text))
        with Folder(tmp_path, ANYWHERE) as folder:
            try:
                assert read_eos_token_ids(folder) in (None, (), (0,), (1,))
            except InvalidField as error:
                assert error.field in ("eos_token_id", "generation_config.json")


def test_an_odd_value_in_adapter_config_json_is_refused_by_the_name_of_its_field():
    for key in LORA_KEYS:
        for text in ODD:
            try:
                read_lora_config(_parse_config(with_value(LORA, key, text)), MODULES, 64)
            except WeightUpdateRefused as error:
                field = error.detail.get("key", ADAPTER_CONFIG)
                assert error.message.startswith(ADAPTER_CONFIG) and field in (key, ADAPTER_CONFIG, *LORA_KEYS), (
                    error.message
                )
                if text in (HUGE, "1e400"):
                    assert field == key
