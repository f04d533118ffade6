"""ERNIE 4.5, dense. Its rotary embedding rotates neighbouring dimensions of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.model_executor.model_config import (
    ModelConfig,
    flag,
    read_common,
    refuse_other_values,
    refuse_rope_scaling,
)
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
    "compression_ratio": (1, None),
    "scale_qk_coeff": (1, None),
    "use_rmsnorm": (True, None),
    "rope_3d": (False, None),
    "lm_head_bias": (False, None),
}
MORE_TOKENS = ("model.mtp_",)  # the layer that predicts further tokens: mtp_block, mtp_emb_norm, mtp_linear_proj, ...


@dataclass(frozen=True)
class ErnieConfig(ModelConfig):
    """The config of an ERNIE 4.5 model. use_bias: all linears of a layer have biases."""

    use_bias: bool


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> ErnieConfig:
    """See ``Architecture.read_config``. Both names of the architecture make the same model."""
    refuse_other_values(raw, PLAIN_VALUES | {"moe_num_experts": (0, [], None)})
    refuse_rope_scaling(raw)
    common = read_common(DEFAULTS | raw | {"architectures": [ARCHITECTURE]}, generation)
    return ErnieConfig(**vars(common), use_bias=flag(raw, "use_bias"))


def build(config: ErnieConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len)
    bias = config.use_bias
    attention = Attention(config, rope, qkv_bias=bias, o_bias=bias, interleaved=True)
    return Model(config, ops, (attention, Mlp(config, bias)), ignored=MORE_TOKENS)


# The second name is that of the checkpoints that Baidu published first.
ARCHITECTURES = dict.fromkeys((ARCHITECTURE, "Ernie4_5_ForCausalLM"), Architecture(read_config, build))
