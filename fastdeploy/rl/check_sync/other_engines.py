"""SGLang and vLLM, as far as their routes show weights. Of all other engines only the answers are checked.

SGLang has /get_weights_by_name: the first rows of a tensor, by the name of the checkpoint, as numbers. It shows q, k,
v, gate and up also where it keeps them in one tensor. Not every model has the route, and none shows experts
(sglang/srt/models/llama.py). With tensor parallelism it shows rows of the first rank, which are the first ones.

vLLM has no route for values. Some builds have /weight_checker (pull request 51350): the sha256 of each tensor as the
engine keeps it, so of q, k and v together.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.fingerprint import ZERO, fingerprint
from fastdeploy.core.serving_dtype import dtype_of, in_dtype
from fastdeploy.rl.check_sync.compare import Values
from fastdeploy.rl.check_sync.report import ServingState
from fastdeploy.rl.check_sync.serving import Calls, typed
from fastdeploy.rl.check_sync.weights import TrainerWeights

BY_NAME, CHECKER = "/get_weights_by_name", "/weight_checker"
SHOWN_VALUES = 1 << 16  # of a tensor that is asked for as JSON
FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj.", ("q", "k", "v")),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.", ("gate", "up")),
)
EXPERT = re.compile(r"(.*\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight")


class UnknownEngine:
    """See ``Engine``. An engine that shows no weights, so that only its answers are checked."""

    method = "answers"
    zero: str | None = None
    has_fingerprints = False
    rows: Mapping[str, int] = {}
    values: Values | None = None

    def state(self) -> ServingState:
        """See ``Engine.state``."""
        return ServingState("unknown")

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """Return nothing."""
        return {}

    def damaged(self, trainer: TrainerWeights) -> list[str]:
        """Return nothing."""
        return []

    def changed(self) -> str | None:
        """Return nothing: the engine tells no label."""
        return None


class SglangEngine(UnknownEngine):
    """See ``Engine``."""

    method = f"the first {SHOWN_VALUES} values of each tensor, by {BY_NAME}"
    zero = ZERO.hex

    def __init__(self, calls: Calls, info: Mapping[str, Any]):
        self._calls, self._info = calls, info
        self._settings = calls.find("/get_server_info") or calls.find("/server_info") or {}
        self._dtype = ""
        self._shapes: Mapping[str, Sequence[int]] = {}  # of the trainer's tensors
        self._shown: list[str] = []
        self.rows: dict[str, int] = {}

    def state(self) -> ServingState:
        """See ``Engine.state``."""
        dtype, quantization = self._settings.get("dtype"), self._settings.get("quantization")
        version = _text(self._info.get("weight_version"))
        return ServingState("sglang", version, dtype=_dtype(dtype), quantization=_text(quantization))

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """See ``Engine.digests``."""
        self._dtype, self._shapes = trainer.dtype, trainer.shapes
        found: dict[str, str] = {}
        for name in trainer.present if not self._settings.get("quantization") else ():
            shown = self._show(name)
            if shown is None and not found:
                break  # this model does not have the route
            if shown is not None:
                self._shown.append(name)
                if len(shown) < trainer.shapes[name][0]:
                    self.rows[name] = len(shown)
                found[name] = fingerprint(shown).hex
        return found

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """See ``Engine.digests_of``."""
        return {
            name: fingerprint(np.ascontiguousarray(weights.read(name)[: self.rows.get(name)])).hex
            for name in self._shown
            if name in weights.present
        }

    def changed(self) -> str | None:
        """See ``Engine.changed``. The label is all that SGLang tells."""
        then, now = self.state().version, (_info(self._calls) or {}).get("weight_version")
        return None if then == _text(now) else f"the version {then} became {now} during the check"

    def values(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Engine.values``."""
        for name in names:
            shown = self._show(name)
            if shown is not None:
                yield name, shown

    def _show(self, name: str) -> np.ndarray | None:
        """Return the first rows of a tensor in the serving dtype; None if the engine does not show it."""
        shape = self._shapes[name]
        rows = max(1, SHOWN_VALUES // max(1, math.prod(shape[1:])))
        try:
            found = self._calls.json("POST", BY_NAME, json={"name": name, "truncate_size": rows})
        except FastDeployError as error:
            if (error.detail.get("status") or 500) < 500:
                return None
            raise
        try:
            values = np.array(found, np.float32)
        except (TypeError, ValueError):
            return None
        if not values.ndim or not values.size:
            return None
        return in_dtype(values, dtype_of(name, self._dtype))


class VllmEngine(UnknownEngine):
    """See ``Engine``."""

    method = f"sha256 of the tensors of the engine, by {CHECKER}; q, k and v are one tensor, and so are gate and up"

    def __init__(self, calls: Calls):
        self._calls = calls
        about = calls.find("/server_info", params={"config_format": "json"}) or {}
        self._settings = _dict(_dict(about.get("vllm_config")).get("model_config"))
        self._shown: frozenset[str] = frozenset()

    def state(self) -> ServingState:
        """See ``Engine.state``."""
        version = _text((self._calls.find("/weight_info") or {}).get("weight_version"))
        dtype, quantization = self._settings.get("dtype"), self._settings.get("quantization")
        return ServingState("vllm", version, dtype=_dtype(dtype), quantization=_text(quantization))

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """See ``Engine.digests``."""
        try:
            reply = self._calls.json("POST", CHECKER, json={"action": "checksum"})
        except FastDeployError:
            return {}
        told = typed(_dict(reply).get("checksums", {}), dict[str, str], f"POST {CHECKER}")
        served = {name.rpartition(":")[2]: digest for name, digest in told.items()}
        if len(served) < len(told):
            return {}  # shards of several ranks: the parts of a tensor
        units = {name: unit(name, trainer.shapes)[0] for name in trainer.present}
        found = {name: served[one] for name, one in units.items() if one in served}
        self._shown = frozenset(found)
        return found

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """See ``Engine.digests_of``."""
        known: dict[str, str] = {}
        found = {}
        for name in weights.present:
            if name in self._shown:
                one, parts = unit(name, weights.shapes)
                if one not in known:
                    sha = hashlib.sha256()
                    for part in parts:
                        sha.update(np.ascontiguousarray(weights.read(part)).data)
                    known[one] = sha.hexdigest()
                found[name] = known[one]
        return found


def unit(name: str, shapes: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the name of vLLM's tensor that has this one, and the tensors of which it is made, in their order."""
    if (found := EXPERT.fullmatch(name)) is not None:
        many = sorted({int(one[len(found[1]) :].split(".")[0]) for one in shapes if one.startswith(found[1])})
        own, kinds = ("w2", ("down",)) if found[2] == "down" else ("w13", ("gate", "up"))
        return f"{found[1]}{own}_weight", [f"{found[1]}{i}.{kind}_proj.weight" for i in many for kind in kinds]
    for pattern, fused, parts_of_it in FUSED:
        if pattern.search(name):
            parts = [pattern.sub(f".{part}_proj.", name) for part in parts_of_it]
            return pattern.sub(fused, name), parts
    return name, [name]


def find_other(calls: Calls) -> UnknownEngine:
    """Return the engine at an address that is none of ours."""
    if (info := _info(calls)) is not None:
        return SglangEngine(calls, info)
    return UnknownEngine() if calls.find("/version") is None else VllmEngine(calls)


def _info(calls: Calls) -> dict[str, Any] | None:
    """Return SGLang's facts about the model; None for another engine."""
    for path in ("/get_model_info", "/model_info"):
        if (found := calls.find(path)) is not None and "is_generation" in found:
            return found
    return None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _dtype(value: Any) -> str | None:
    """Return the name of a dtype without "torch."; None for one that depends on the model."""
    name = str(value or "auto").rpartition(".")[2]
    return None if name == "auto" else name
