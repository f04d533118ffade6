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
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from fastdeploy.core.errors import WeightUpdateRefused, shown
from fastdeploy.core.weight_source import ADAPTER_CONFIG
from fastdeploy.model_executor import pattern_process

ALL_LINEAR = "all-linear"
NO_EXPERTS = (
    "Adapters of experts, shared experts, routers and kv_b_proj are not supported; name the other linears of attention "
    "(q_proj, k_proj, v_proj, o_proj; with kv_b_proj q_a_proj, q_b_proj or q_proj, kv_a_proj_with_mqa, o_proj), or "
    "exclude those with exclude_modules"
)
# Of the process that matches the expressions of a config. 900 of them with 900 names take about 0.15 s.
MAX_CPU_S, TIMEOUT_S = 1, 20.0
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
    # The others (pissa, corda, olora, loftq, lora_ga) change the base weights too, unless PEFT converts the adapter on
    # saving. A converted adapter has the value true.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}


class LoraSetting(NamedTuple):
    """The adapter of one module: it adds scaling * (x @ A.T) @ B.T, with A [rank, in_features], B [out_features,
    rank]."""

    rank: int
    scaling: float


class Modules(NamedTuple):
    """The modules of a model, by their names in checkpoints. output: the one of ``linears`` that gives the logits.
    others: modules with weights that no adapter can change. experts: those of them that are linears: experts, shared
    experts and routers, and kv_b_proj of latent attention. PEFT finds experts by these names, too, where transformers
    stacks all experts in one tensor (peft/utils/transformers_weight_conversion.py), and counts them to all-linear."""

    linears: tuple[str, ...]
    output: str
    others: tuple[str, ...]
    experts: tuple[str, ...] = ()


class _Fields(msgspec.Struct, frozen=True):
    """The fields that are followed, with PEFT's defaults."""

    target_modules: frozenset[str] | str
    exclude_modules: frozenset[str] | str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None


class _Patterns(NamedTuple):
    """Regular expressions of one field, and the method of ``re`` that matches them with names."""

    field: str
    method: str
    expressions: tuple[str, ...]


class _Hit(NamedTuple):
    """The first expression of a field that matches a name. number: counts the expressions from 0. layer: the number of
    the layer as text, or ""."""

    number: int
    layer: str


# For each field with expressions: the names that match one of them.
_Hits = Mapping[str, Mapping[str, _Hit]]


class _Refused(NamedTuple):
    """The refusal of expressions, which is remembered as their hits are."""

    field: str
    why: str


def refuse_field(field: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"{ADAPTER_CONFIG}: {field}: {why}", file=ADAPTER_CONFIG, key=field)


def read_lora_config(raw: Mapping[str, Any], modules: Modules, max_rank: int) -> dict[str, LoraSetting]:
    """Return the adapted modules, in the order of ``modules``. raw: the parsed file. max_rank: the largest rank that is
    accepted. Starts a process if the config has regular expressions; a config that was seen lately needs none."""
    fields = _read_fields(raw)
    hits = _hits(fields, modules)
    for name in modules.experts:
        if _is_target(name, fields, modules, hits):
            raise refuse_field("target_modules", f"{name} is targeted: {NO_EXPERTS}")
    for name in modules.others:
        if _is_target(name, fields, modules, hits):
            raise refuse_field("target_modules", f"{name} is targeted, expected linear modules only")
    settings = {
        name: _setting(name, fields, hits) for name in modules.linears if _is_target(name, fields, modules, hits)
    }
    if not settings:
        raise refuse_field(
            "target_modules", f"expected at least one linear of the model, got {shown(raw['target_modules'])}"
        )
    for name, setting in settings.items():
        if setting.rank > max_rank:
            field = "rank_pattern" if setting.rank != fields.r else "r"
            raise refuse_field(field, f"{name} has rank {setting.rank}, this server takes {max_rank} (--max-lora-rank)")
    return settings


def check_expressions(raw: Mapping[str, Any], modules: Modules) -> None:
    """Raise the error of :func:`read_lora_config` if a field or a regular expression of the config is refused. After
    that the same config is read without a process. May be called on many threads, beside the packing of adapters."""
    _hits(_read_fields(raw), modules)


def _read_fields(raw: Mapping[str, Any]) -> _Fields:
    for field, value in raw.items():
        if field in SUPPORTED:
            if not any(value == one and type(value) is type(one) for one in SUPPORTED[field]):
                expected = " or ".join(json.dumps(one) for one in SUPPORTED[field])
                why = f". {NO_EXPERTS}" if field == "target_parameters" else ""
                raise refuse_field(field, f"{shown(value)} is not supported, expected {expected}{why}")
        elif field not in IGNORED and field not in _Fields.__struct_fields__:
            raise refuse_field(field, f"is not a known field, got {shown(value)}")
    given = {field: raw[field] for field in _Fields.__struct_fields__ if field in raw}
    if "target_modules" not in given:
        raise refuse_field("target_modules", f"is missing, expected a list, a regular expression or {ALL_LINEAR!r}")
    try:
        fields = msgspec.convert(given, _Fields)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).rpartition(" - at `$.")
        field = re.split(r"\W", path, maxsplit=1)[0]
        raise refuse_field(field, f"{expected.lower()}, got {shown(given[field])}") from error
    if isinstance(fields.target_modules, str) and fields.layers_to_transform is not None:
        raise refuse_field("layers_to_transform", "expected null where target_modules is a string")
    if fields.layers_pattern and fields.layers_to_transform is None:
        raise refuse_field("layers_pattern", "expected null without layers_to_transform")
    return fields


def _setting(name: str, fields: _Fields, hits: _Hits) -> LoraSetting:
    rank = _of_pattern(fields.rank_pattern, hits["rank_pattern"].get(name), fields.r)
    alpha = _of_pattern(fields.alpha_pattern, hits["alpha_pattern"].get(name), fields.lora_alpha)
    return LoraSetting(rank, alpha / math.sqrt(rank) if fields.use_rslora else alpha / rank)


def _of_pattern(values: Mapping[str, Any] | None, hit: _Hit | None, default: Any) -> Any:
    """Return the value of the key that matches, or the default."""
    return default if values is None or hit is None else next(islice(values.values(), hit.number, None))


def _is_target(name: str, fields: _Fields, modules: Modules, hits: _Hits) -> bool:
    exclude, target = fields.exclude_modules, fields.target_modules
    if name in hits["exclude_modules"] or (isinstance(exclude, frozenset) and _is_named(name, exclude)):
        return False
    if isinstance(target, str):
        if target.lower() == ALL_LINEAR:
            return name != modules.output and name not in modules.others
        return name in hits["target_modules"]
    return name in target or (_is_named(name, target) and _in_chosen_layer(name, fields, hits["layers_pattern"]))


def _is_named(name: str, names: frozenset[str]) -> bool:
    """Whether ``names`` has the dotted name, or an end of it that begins after a dot."""
    parts = name.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


def _in_chosen_layer(name: str, fields: _Fields, hits: Mapping[str, _Hit]) -> bool:
    """Whether layers_to_transform has the layer of the module."""
    chosen = fields.layers_to_transform
    if chosen is None or chosen == []:
        return True
    layer = hits[name].layer if name in hits else ""
    return layer != "" and int(layer) in (chosen if isinstance(chosen, list) else [chosen])


def _patterns(fields: _Fields) -> tuple[_Patterns, ...]:
    """Return all regular expressions of the config, as PEFT builds them."""
    target, exclude = (
        (one,) if isinstance(one, str) and one else () for one in (fields.target_modules, fields.exclude_modules)
    )
    ranks, alphas = (
        tuple(rf"(.*\.)?({key})$" for key in values or {}) for values in (fields.rank_pattern, fields.alpha_pattern)
    )
    return (
        _Patterns("target_modules", "fullmatch", () if target and target[0].lower() == ALL_LINEAR else target),
        _Patterns("exclude_modules", "fullmatch", exclude),
        _Patterns("rank_pattern", "match", ranks),
        _Patterns("alpha_pattern", "match", alphas),
        _Patterns("layers_pattern", "match", _layer_patterns(fields)),
    )


def _layer_patterns(fields: _Fields) -> tuple[str, ...]:
    if fields.layers_to_transform is None:
        return ()
    given = fields.layers_pattern or []
    before = [rf"(?:^|.*?\.){one}" for one in ([given] if isinstance(given, str) else given)] or [ANY_LAYER]
    return tuple(rf"{one}\.(?P<idx>\d+)\." for one in before)


def _hits(fields: _Fields, modules: Modules) -> _Hits:
    """Return the names that match. Raises WeightUpdateRefused."""
    hits = _match(_patterns(fields), (*modules.linears, *modules.experts, *modules.others))
    if isinstance(hits, _Refused):
        raise refuse_field(*hits)
    return hits


@functools.lru_cache(maxsize=64)  # the adapters of one trainer have the same config
def _match(patterns: tuple[_Patterns, ...], names: tuple[str, ...]) -> _Hits | _Refused:
    """Match the expressions with all names, in another process (see pattern_process.py). Raises WeightUpdateRefused,
    which is not remembered, where the reason may lie with this machine."""
    used = [one for one in patterns if one.expressions]
    found: dict[str, dict[str, _Hit]] = {one.field: {} for one in patterns}
    if not used:
        return found
    task = json.dumps({"names": names, "patterns": [one[1:] for one in used], "cpu_s": MAX_CPU_S})
    command = [sys.executable, "-I", "-S", str(Path(pattern_process.__file__))]
    refused = _Refused(
        ", ".join(one.field for one in used),
        f"a regular expression takes more than {MAX_CPU_S} s or too much memory to match",
    )
    try:
        done = subprocess.run(command, input=task.encode(), capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise refuse_field(*refused) from error
    if done.returncode == -signal.SIGKILL:  # not by the limit, but perhaps since the machine has no memory
        raise refuse_field(*refused)
    if done.returncode != 0:
        return refused
    result = json.loads(done.stdout)
    if "bad" in result:
        at, number = result["bad"]
        expression = shown(used[at].expressions[number])
        return _Refused(used[at].field, f"{expression} is not a regular expression: {result['why']}")
    for one, hits in zip(used, result["hits"], strict=True):
        found[one.field] = {name: _Hit(*hit) for name, hit in hits.items()}
    return found
