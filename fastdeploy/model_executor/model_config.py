"""What a model is, from the ``config.json`` and ``generation_config.json`` of a Hugging Face folder.

A key that would change the result and is not supported is an InvalidField that names it, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.safe_files import ANYWHERE, Folder

CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e15
FULL_ATTENTION = "full_attention"
DTYPES = ("float32", "bfloat16", "float16")
_DESCRIPTIVE = ("dtype", "eos_token_ids", "max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Field names are those of config.json where it has one. head_dim need not be hidden_size / heads.

    qkv_bias: q, k and v projections have biases (Qwen2, or attention_bias); o_bias: the output projection has one.
    qk_norm: per-head RMSNorm on q and k (Qwen3). dtype: what the checkpoint says of itself, "float32" if nothing.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    def first_difference(self, other: ModelConfig) -> str | None:
        """Name of the first key by which weights of ``other`` could not stand in for weights of this model, or None."""
        for field in fields(self):
            if field.name not in _DESCRIPTIVE and getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None


def load_config(path: str | Path) -> ModelConfig:
    """Read the config of the folder ``path``. Raises InvalidField that names the key (or the file) that is missing,
    malformed or not supported."""
    try:
        folder = Folder(path, ANYWHERE)
    except OSError as error:
        raise InvalidField(CONFIG, f"cannot be read: the folder {str(path)!r}: {error.strerror}") from error
    with folder:
        return read_config(folder)


def read_config(folder: Folder) -> ModelConfig:
    """Read the config of an open folder; see :func:`load_config`."""
    raw = _read_json(folder, CONFIG)
    return parse_config(raw, _read_json(folder, GENERATION) if folder.has(GENERATION) else {})


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """``raw``: config.json; ``generation``: generation_config.json, whose eos_token_id comes before config.json's."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    qwen3 = architecture == "Qwen3ForCausalLM"
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    kv_heads = heads if raw.get("num_key_value_heads", 0) is None else _count(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise InvalidField("num_key_value_heads", f"expected a divisor of {heads} (the heads), got {kv_heads}")
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim")
    else:  # transformers' own defaults
        head_dim = 128 if qwen3 and "head_dim" not in raw else hidden // heads
    if head_dim % 2 or head_dim > 512:
        raise InvalidField("head_dim", f"expected an even number (rotary pairs) up to 512, got {head_dim}")
    attention_bias = qwen3 and _flag(raw, "attention_bias")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise InvalidField("torch_dtype", f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_hidden_layers=_count(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=not qwen3 or attention_bias,
        o_bias=attention_bias,
        qk_norm=qwen3,
        max_position_embeddings=_count(raw, "max_position_embeddings", 32768),
        dtype=dtype,
        eos_token_ids=_eos(raw, generation or {}),
    )


def _read_json(folder: Folder, file: str) -> dict[str, Any]:
    try:
        value = json.loads(folder.read(file, MAX_CONFIG_BYTES))
    except OSError as error:
        raise InvalidField(file, f"cannot be read in {folder.path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidField(file, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidField(file, "expected a JSON object")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    from fastdeploy.model_executor.models import MODELS

    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InvalidField("architectures", f"expected a list of one name, got {names!r}")
    if names[0] not in MODELS:
        raise InvalidField("architectures", f"expected one of {', '.join(sorted(MODELS))}, got {names[0]!r}")
    return names[0]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise InvalidField("quantization_config", "quantised checkpoints are not supported")
    layer_types = raw.get("layer_types")
    layers = _count(raw, "num_hidden_layers")
    if layer_types is not None and (
        not isinstance(layer_types, list)
        or len(layer_types) != layers
        or not all(kind == FULL_ATTENTION for kind in layer_types)
    ):
        raise InvalidField("layer_types", "expected full_attention for each of num_hidden_layers")
    slides = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    first_sliding = raw.get("max_window_layers", 28)
    if type(first_sliding) is not int:
        raise InvalidField("max_window_layers", f"expected an integer, got {first_sliding!r}")
    if slides and layer_types is None and first_sliding < layers:
        raise InvalidField("use_sliding_window", "sliding window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidField("hidden_act", f"only silu is supported, got {raw['hidden_act']!r}")
    if raw.get("use_mrope"):
        raise InvalidField("use_mrope", "multimodal rotary embedding is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise InvalidField(key, f"expected an object or null, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in (None, "default"):
            raise InvalidField(key, f"only the default rotary embedding is supported, got {kind!r}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise InvalidField(f"{key}.partial_rotary_factor", "a partial rotary embedding is not supported")


def _rope_theta(raw: dict[str, Any]) -> float:
    """In rope_parameters (newer transformers) or at the top level (older)."""
    parameters = raw.get("rope_parameters") or {}
    if "rope_theta" in parameters:
        return _positive(parameters, "rope_theta", 10000.0, "rope_parameters.")
    return _positive(raw, "rope_theta", 10000.0)


def _eos(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in ids):
        raise InvalidField("eos_token_id", f"expected a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


def _count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise InvalidField(
            key, f"expected an integer from 1 to 2**31 - 1, got {value!r}" if key in raw else "is missing"
        )
    return value


def _positive(raw: dict[str, Any], key: str, default: float, prefix: str = "") -> float:
    value = raw.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
        raise InvalidField(prefix + key, f"expected a number above 0 and at most {MAX_NUMBER:g}, got {value!r}")
    return float(value)


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if type(value) is not bool:
        raise InvalidField(key, f"expected true or false, got {value!r}")
    return value
