"""Llama 2, 3, 3.1 and 3.2 (text), and other models whose config.json names LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import (
    ModelConfig,
    count,
    flag,
    positive,
    read_common,
    refuse_rope_scaling,
    rope_settings,
)
from fastdeploy.model_executor.models.decoder import Attention, Mlp, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.interface import Ops

LLAMA3 = "llama3"
ORIGINAL_LENGTH = "original_max_position_embeddings"


class Llama3Rope(NamedTuple):
    """The rotary embedding of Llama 3.1, with the names of config.json. Wavelengths are in positions."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide the frequencies of long waves by ``factor``, float32 [N] -> [N].

        A wave is long if fewer than low_freq_factor of its periods fit into the original context. It is short, and does
        not change, if more than high_freq_factor fit. Between the two, its frequency is interpolated linearly in that
        number. The formula is that of "llama3" in modeling_rope_utils.py of transformers.
        """
        waves = np.float32(self.original_max_position_embeddings) * frequencies / np.float32(2 * np.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((waves - np.float32(self.low_freq_factor)) / np.float32(width), 0, 1)
        return ((1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies).astype(np.float32)


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """The config of a Llama model. attention_bias: the four projections of the attention have biases; mlp_bias: the
    three of the MLP have. rope: None for the default rotary embedding."""

    attention_bias: bool
    mlp_bias: bool
    rope: Llama3Rope | None


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> LlamaConfig:
    """See ``Architecture.read_config``."""
    defaults = {"max_position_embeddings": 2048, "num_key_value_heads": None}
    common = read_common(defaults | raw, generation)
    return LlamaConfig(
        **vars(common),
        attention_bias=flag(raw, "attention_bias"),
        mlp_bias=flag(raw, "mlp_bias"),
        rope=_read_rope(raw),
    )


def _read_rope(raw: dict[str, Any]) -> Llama3Rope | None:
    refuse_rope_scaling(raw, LLAMA3)
    key, settings = rope_settings(raw)
    if settings.get("rope_type", settings.get("type")) != LLAMA3:
        return None
    if ORIGINAL_LENGTH in raw:  # transformers prefers the key at the top level
        settings = settings | {ORIGINAL_LENGTH: raw[ORIGINAL_LENGTH]}
    rope = Llama3Rope(
        factor=positive(settings, "factor", where=key),
        low_freq_factor=positive(settings, "low_freq_factor", where=key),
        high_freq_factor=positive(settings, "high_freq_factor", where=key),
        original_max_position_embeddings=count(settings, ORIGINAL_LENGTH, where=key),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        found = f"{rope.high_freq_factor:g}, not above {rope.low_freq_factor:g}"
        raise InvalidField(f"{key}.high_freq_factor", f"expected more than low_freq_factor, got {found}")
    return rope


def build(config: LlamaConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    frequencies = rope_frequencies(config.head_dim, config.rope_theta)
    if config.rope is not None:
        frequencies = config.rope.scale(frequencies)
    rope = rope_tables(frequencies, max_model_len)
    attention = Attention(config, rope, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    return Model(config, ops, (attention, Mlp(config, config.mlp_bias)))


ARCHITECTURES = {"LlamaForCausalLM": Architecture(read_config, build)}
