"""Mistral: a Llama without biases. With a sliding window, a token attends to the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.model_executor.model_config import ModelConfig, count, read_common, refuse_rope_scaling
from fastdeploy.model_executor.models.decoder import Attention, Mlp, rope_frequencies, rope_tables
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.interface import Ops

DEFAULTS = {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


@dataclass(frozen=True)
class MistralConfig(ModelConfig):
    """The config of a Mistral model. sliding_window: the tokens that a token attends to, itself included; None: all."""

    sliding_window: int | None


def read_config(raw: dict[str, Any], generation: dict[str, Any]) -> MistralConfig:
    """See ``Architecture.read_config``."""
    raw = DEFAULTS | raw
    refuse_rope_scaling(raw)
    window = None if raw["sliding_window"] is None else count(raw, "sliding_window")
    return MistralConfig(**vars(read_common(raw, generation)), sliding_window=window)


def build(config: MistralConfig, ops: Ops, max_model_len: int) -> Model:
    """See ``Architecture.build``."""
    rope = rope_tables(rope_frequencies(config.head_dim, config.rope_theta), max_model_len)
    return Model(config, ops, (Attention(config, rope, window=config.sliding_window or 0), Mlp(config)))


ARCHITECTURES = {"MistralForCausalLM": Architecture(read_config, build)}
