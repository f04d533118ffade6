"""The adapter_config.json of a PEFT adapter: which modules it adapts, with which rank and scaling.

The rules are those of peft 0.21 (peft/tuners/tuners_utils.py, check_target_module_exists; peft/utils/other.py,
get_pattern_key; peft/tuners/lora). A field that would change the computation in a way that is not supported is refused
by its name, and so is a field that is not known. Every error is a WeightUpdateRefused whose ``detail`` has the field as
``key``.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.model_executor import pattern_process

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
# Of the process that matches the expressions of a config. 900 of them with 900 names take about 1 s.
MAX_CPU_S, TIMEOUT_S = 5, 120.0
ANY_LAYER = r".*?\.[^.]*"

Rank = Annotated[int, Meta(ge=1, le=65536)]
Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]

# Fields without an effect on the computation: notes, settings of training, and settings of how training begins.
IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
})  # fmt: skip
# Fields that would change the computation, and the values with which they do not.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "ensure_weight_tying": (False,),
    "fan_in_fan_out": (False,),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "peft_type": ("LORA",),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (None,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (None,),
    # The others (pissa, corda, olora, loftq) change the base weights too, unless PEFT converts the adapter on saving.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
}


class LoraSetting(NamedTuple):
    """The adapter of one module: scaling * (x @ A.T) @ B.T is added, A [rank, in_features], B [out_features, rank]."""

    rank: int
    scaling: float


class Modules(NamedTuple):
    """The modules of a model, by their names in transformers. output: the one of ``linears`` that gives the logits.
    others: modules with weights that no adapter can change."""

    linears: tuple[str, ...]
    output: str
    others: tuple[str, ...]


class _Fields(msgspec.Struct, frozen=True):
    """The fields that are followed, with PEFT's defaults."""

    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None


class _Pattern(NamedTuple):
    """A regular expression, and the method of ``re`` that matches it with names."""

    field: str
    method: str
    expression: str


# For each expression: the names that match, each with the number of its layer, or "".
_Hits = Mapping[_Pattern, Mapping[str, str]]


def refuse_field(field: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"{CONFIG}: {field}: {why}", file=CONFIG, key=field)


def read_lora_config(raw: Mapping[str, Any], modules: Modules, max_rank: int) -> dict[str, LoraSetting]:
    """Return the adapted modules, in the order of ``modules``. raw: the parsed file. max_rank: the largest rank that is
    accepted. Starts a process if the config has regular expressions; a config that was seen lately needs none."""
    fields = _read_fields(raw)
    hits = _match(_patterns(fields), (*modules.linears, *modules.others))
    for name in modules.others:
        if _is_target(name, fields, modules, hits):
            raise refuse_field("target_modules", f"{name} is targeted, expected linear modules only")
    settings = {
        name: _setting(name, fields, hits) for name in modules.linears if _is_target(name, fields, modules, hits)
    }
    if not settings:
        raise refuse_field(
            "target_modules", f"expected at least one linear of the model, got {_short(fields.target_modules)}"
        )
    for name, setting in settings.items():
        if setting.rank > max_rank:
            field = "rank_pattern" if setting.rank != fields.r else "r"
            raise refuse_field(field, f"{name} has rank {setting.rank}, this server takes {max_rank} (--max-lora-rank)")
    return settings


def _read_fields(raw: Mapping[str, Any]) -> _Fields:
    for field, value in raw.items():
        if field in SUPPORTED:
            if not any(value == one and type(value) is type(one) for one in SUPPORTED[field]):
                expected = " or ".join(json.dumps(one) for one in SUPPORTED[field])
                raise refuse_field(field, f"{_short(value)} is not supported, expected {expected}")
        elif field not in IGNORED and field not in _Fields.__struct_fields__:
            raise refuse_field(field, f"is not a known field, got {_short(value)}")
    given = {field: raw[field] for field in _Fields.__struct_fields__ if field in raw}
    if "target_modules" not in given:
        raise refuse_field("target_modules", f"is missing, expected a list, a regular expression or {ALL_LINEAR!r}")
    try:
        fields = msgspec.convert(given, _Fields)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).rpartition(" - at `$.")
        field = re.split(r"\W", path, maxsplit=1)[0]
        raise refuse_field(field, f"{expected.lower()}, got {_short(given[field])}") from error
    if isinstance(fields.target_modules, str) and fields.layers_to_transform is not None:
        raise refuse_field("layers_to_transform", "expected null where target_modules is a string")
    if fields.layers_pattern and fields.layers_to_transform is None:
        raise refuse_field("layers_pattern", "expected null without layers_to_transform")
    return fields


def _setting(name: str, fields: _Fields, hits: _Hits) -> LoraSetting:
    rank = _of_pattern(name, "rank_pattern", fields.rank_pattern, hits) or fields.r
    alpha = _of_pattern(name, "alpha_pattern", fields.alpha_pattern, hits)
    alpha = fields.lora_alpha if alpha is None else alpha
    return LoraSetting(rank, alpha / math.sqrt(rank) if fields.use_rslora else alpha / rank)


def _of_pattern(name: str, field: str, values: Mapping[str, Any] | None, hits: _Hits) -> Any:
    """Return the value of the first key that matches the end of the name, or None."""
    for key, value in (values or {}).items():
        if name in hits[_suffix_pattern(field, key)]:
            return value
    return None


def _is_target(name: str, fields: _Fields, modules: Modules, hits: _Hits) -> bool:
    exclude, target = fields.exclude_modules, fields.target_modules
    if exclude:
        if isinstance(exclude, str):
            excluded = name in hits[_whole_pattern("exclude_modules", exclude)]
        else:
            excluded = name in exclude or _ends_with_one_of(name, exclude)
        if excluded:
            return False
    if isinstance(target, str):
        if target.lower() == ALL_LINEAR:
            return name in modules.linears and name != modules.output
        return name in hits[_whole_pattern("target_modules", target)]
    return name in target or (_ends_with_one_of(name, target) and _in_chosen_layer(name, fields, hits))


def _ends_with_one_of(name: str, endings: Sequence[str]) -> bool:
    """Whether one of ``endings`` is the end of the dotted name, and begins after a dot."""
    parts = name.split(".")
    ends = {".".join(parts[i:]) for i in range(1, len(parts))}
    return not ends.isdisjoint(endings)


def _in_chosen_layer(name: str, fields: _Fields, hits: _Hits) -> bool:
    """Whether layers_to_transform has the layer of the module. The first pattern that matches tells the layer."""
    chosen = fields.layers_to_transform
    if chosen is None or chosen == []:
        return True
    for pattern in _layer_patterns(fields):
        if name in hits[pattern]:
            layer = hits[pattern][name]
            return layer != "" and int(layer) in (chosen if isinstance(chosen, list) else [chosen])
    return False


def _patterns(fields: _Fields) -> tuple[_Pattern, ...]:
    """Return all regular expressions of the config, as PEFT builds them."""
    found = []
    if isinstance(fields.target_modules, str) and fields.target_modules.lower() != ALL_LINEAR:
        found.append(_whole_pattern("target_modules", fields.target_modules))
    if fields.exclude_modules and isinstance(fields.exclude_modules, str):
        found.append(_whole_pattern("exclude_modules", fields.exclude_modules))
    found += [_suffix_pattern("rank_pattern", key) for key in fields.rank_pattern or {}]
    found += [_suffix_pattern("alpha_pattern", key) for key in fields.alpha_pattern or {}]
    if fields.layers_to_transform is not None:
        found += _layer_patterns(fields)
    return tuple(found)


def _whole_pattern(field: str, expression: str) -> _Pattern:
    return _Pattern(field, "fullmatch", expression)


def _suffix_pattern(field: str, key: str) -> _Pattern:
    return _Pattern(field, "match", rf"(.*\.)?({key})$")


def _layer_patterns(fields: _Fields) -> list[_Pattern]:
    given = fields.layers_pattern
    before = [rf"(?:^|.*?\.){one}" for one in ([given] if isinstance(given, str) else given)] if given else [ANY_LAYER]
    return [_Pattern("layers_pattern", "match", rf"{one}\.(?P<idx>\d+)\.") for one in before]


@functools.lru_cache(maxsize=64)  # the adapters of one trainer have the same config
def _match(patterns: tuple[_Pattern, ...], names: tuple[str, ...]) -> _Hits:
    """Match the expressions with all names, in another process (see pattern_process.py)."""
    if not patterns:
        return {}
    expressions = [(one.method, one.expression) for one in patterns]
    task = json.dumps({"names": names, "patterns": expressions, "cpu_s": MAX_CPU_S})
    command = [sys.executable, "-I", "-S", str(Path(pattern_process.__file__))]
    fields = ", ".join(dict.fromkeys(one.field for one in patterns))
    try:
        done = subprocess.run(command, input=task.encode(), capture_output=True, timeout=TIMEOUT_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        why = f"a regular expression takes more than {MAX_CPU_S} s or too much memory to match"
        raise refuse_field(fields, why) from error
    result = json.loads(done.stdout)
    if "bad" in result:
        bad = patterns[result["bad"]]
        raise refuse_field(bad.field, f"{_short(bad.expression)} is not a regular expression: {result['why']}")
    return dict(zip(patterns, result["hits"], strict=True))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
