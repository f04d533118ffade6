"""ERNIE 4.5, dense. Its rotary embedding rotates neighbouring dimensions of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.model_executor.model_config import ModelConfig, flag, read_common, refuse_rope_scaling
from fastdeploy.model_executor.models.decoder import Attention, Mlp, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.interface import Ops

ARCHITECTURE = "Ernie4_5ForCausalLM"
DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# Keys of Baidu's own configs that change the result, and the values that are the same as no key.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "moe_num_experts": (0, [], None),
    "num_nextn_predict_layers": (0, None),
    "compression_ratio": (1, None),
    "scale_qk_coeff": (1, None),
    "use_rmsnorm": (True, None),
    "rope_3d": (False, None),
    "lm_head_bias": (False, None),
}


@dataclass(frozen=True)
class ErnieConfig(ModelConfig):
    """The config of an ERNIE 4.5 model. use_bias: all linears of a layer have biases."""

    use_bias: bool


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> ErnieConfig:
    """See ``Architecture.read_config``. Both names of the architecture make the same model."""
    for key, values in PLAIN_VALUES.items():
        if key in raw and raw[key] not in values:
            raise InvalidField(key, f"only {shown(values[0])} is supported, got {shown(raw[key])}")
    refuse_rope_scaling(raw)
    common = read_common(DEFAULTS | raw | {"architectures": [ARCHITECTURE]}, generation)
    return ErnieConfig(**vars(common), use_bias=flag(raw, "use_bias"))


def build(config: ErnieConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len)
    bias = config.use_bias
    attention = Attention(config, rope, qkv_bias=bias, o_bias=bias, interleaved=True)
    return Model(config, ops, (attention, Mlp(config, bias)))


# The second name is that of the checkpoints that Baidu published first.
ARCHITECTURES = dict.fromkeys((ARCHITECTURE, "Ernie4_5_ForCausalLM"), Architecture(read_config, build))
REFUSED = {
    "Ernie4_5_MoeForCausalLM": "has a mixture of experts, which is not supported; "
    f"of ERNIE 4.5 only the dense models are supported ({ARCHITECTURE})"
}
