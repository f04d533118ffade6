"""The part of a model's config that all architectures share, and checks of the values in ``config.json``.

An unsupported key that changes the result is never ignored: it raises InvalidField with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fastdeploy.core.errors import InvalidField, shown

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 1 << 14  # lists of layers are made before any tensor is looked at
MAX_NUMBER = 1e15
MAX_HEAD_DIM = 576  # of the ops
DTYPES = ("float32", "bfloat16", "float16")
SLIDING, FULL = "sliding_attention", "full_attention"  # the kinds of the key layer_types
# more_layers: of a checkpoint, behind those of the model
_DESCRIPTIVE = ("dtype", "eos_token_ids", "max_position_embeddings", "more_layers")


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that all architectures have, under the same names. An architecture adds its own fields.
    head_dim may differ from hidden_size / heads.

    dtype: the type of the checkpoint, "float32" if it names none. eos_token_ids: any of them ends a text.
    norms_add_one: the RMSNorms of the architecture multiply with 1 + weight. keys_only: see ``KVCache``
    (ops/interface.py).
    """

    norms_add_one: ClassVar[bool] = False
    keys_only: ClassVar[bool] = False

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
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    def first_difference(self, other: ModelConfig) -> str | None:
        """Return the first field that makes weights of ``other`` unusable for this model, or None. It is "field.part"
        if one part of a named tuple differs."""
        for name in (field.name for field in fields(self) if field.name not in _DESCRIPTIVE):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                parts = getattr(ours, "_fields", ()) if type(ours) is type(theirs) else ()
                return ".".join([name, *(part for part in parts if getattr(ours, part) != getattr(theirs, part))][:2])
        return None


def read_common(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Read the common part of a config. raw: config.json, with the architecture's own defaults for missing keys.
    generation: generation_config.json; its eos_token_id has priority over that of config.json. Raises InvalidField."""
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        what = f"quantised checkpoints are not supported, got {shown(method)}"
        raise InvalidField("quantization_config", f"{what}: dequantize the weights, and save the model in bfloat16")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidField("hidden_act", f"only silu is supported, got {shown(raw['hidden_act'])}")
    heads, hidden = count(raw, "num_attention_heads"), count(raw, "hidden_size")
    kv_heads = heads if raw.get("num_key_value_heads", 0) is None else count(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise InvalidField("num_key_value_heads", f"expected a divisor of {heads} (the heads), got {kv_heads}")
    head_dim = hidden // heads if raw.get("head_dim") is None else count(raw, "head_dim")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InvalidField("head_dim", f"expected an even number (rotary pairs) up to {MAX_HEAD_DIM}, got {head_dim}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise InvalidField("torch_dtype", f"expected one of {', '.join(DTYPES)}, got {shown(dtype)}")
    in_generation = generation.get("eos_token_id")
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(raw, "intermediate_size"),
        num_hidden_layers=count(raw, "num_hidden_layers", most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        max_position_embeddings=count(raw, "max_position_embeddings"),
        dtype=dtype,
        eos_token_ids=eos_ids(raw.get("eos_token_id") if in_generation is None else in_generation),
    )


def rope_settings(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the settings of the rotary embedding and the key that they are found under: rope_scaling, or
    rope_parameters in newer checkpoints. The settings are empty if there are none."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    return key, raw.get(key) or {}


def refuse_rope_scaling(raw: dict[str, Any], *allowed: str, partial: bool = False) -> None:
    """Raise InvalidField if the rotary embedding is neither the default nor of an ``allowed`` type. partial: it may
    rotate a part of each head."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise InvalidField(key, f"expected an object or null, got {shown(rope)}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in (None, "default", *allowed):
            supported = " and ".join(("the default rotary embedding", *allowed))
            raise InvalidField(key, f"only {supported} is supported, got {shown(kind)}")
        if not partial and rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise InvalidField(f"{key}.partial_rotary_factor", "a partial rotary embedding is not supported")


def refuse_other_values(raw: Mapping[str, Any], supported: Mapping[str, Sequence[Any]]) -> None:
    """Raise InvalidField for a key whose value is none of those that are supported. A key may be missing."""
    for key, values in supported.items():
        if key in raw and raw[key] not in values:
            raise InvalidField(key, f"only {shown(values[0])} is supported, got {shown(raw[key])}")


def layer_kinds(kinds: Any, layers: int) -> tuple[str, ...]:
    """Return the value of the key layer_types, SLIDING or FULL for each of so many layers. Raises InvalidField."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise InvalidField("layer_types", f"expected {SLIDING} or {FULL} for each of num_hidden_layers")
    return tuple(kinds)


def _rope_theta(raw: dict[str, Any]) -> float:
    """Read rope_theta from rope_parameters (newer transformers) or from the top level (older)."""
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        return positive(parameters, "rope_theta", where="rope_parameters")
    return positive(raw, "rope_theta", 10000.0)


def eos_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of the key eos_token_id: of an id, a list of them, or null. Raises InvalidField."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in ids):
        raise InvalidField("eos_token_id", f"expected a token id or a list of them, got {shown(value)}")
    return tuple(dict.fromkeys(ids))


def count(raw: dict[str, Any], key: str, where: str = "", least: int = 1, most: int = MAX_COUNT) -> int:
    """Return an integer from ``least`` to ``most``. where: the key of the object ``raw`` in config.json, "" at the top
    level. Raises InvalidField."""
    value = raw.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _invalid(raw, key, where, f"an integer from {least} to {'2**31 - 1' if most == MAX_COUNT else most}")
    return value


def positive(raw: dict[str, Any], key: str, default: float | None = None, where: str = "") -> float:
    """Return a number above 0 and at most MAX_NUMBER, ``default`` if the key is missing; see :func:`count`."""
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
        raise _invalid(raw, key, where, f"a number above 0 and at most {MAX_NUMBER:g}")
    return float(value)


def flag(raw: dict[str, Any], key: str, where: str = "") -> bool:
    """Return true or false, false if the key is missing; see :func:`count`."""
    value = raw.get(key, False)
    if type(value) is not bool:
        raise _invalid(raw, key, where, "true or false")
    return value


def _invalid(raw: dict[str, Any], key: str, where: str, expected: str) -> InvalidField:
    message = f"expected {expected}, got {shown(raw[key])}" if key in raw else "is missing"
    return InvalidField(f"{where}.{key}" if where else key, message)
