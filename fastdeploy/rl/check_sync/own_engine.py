"""A server or a fleet of this package: fingerprints of tensors first, and then the tensors that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.fingerprint import ZERO
from fastdeploy.model_executor.safetensors_source import DTYPES, header_length, read_header
from fastdeploy.rl.check_sync.report import ServingState
from fastdeploy.rl.check_sync.serving import Calls, ChangedMeanwhile, ReplicasDiffer
from fastdeploy.rl.check_sync.weights import TrainerWeights

WEIGHTS, EXPORT, ADAPTERS = "/v1/weights", "/v1/weights/export", "/v1/adapters"
EXPORTED = 200  # names in one URL
PLACE = ("boot_id", "weight_epoch")  # of the weights that serve


class OwnEngine:
    """See ``Engine``."""

    method = "fingerprints of all tensors"
    zero: str | None = ZERO.hex
    has_fingerprints = True

    def __init__(self, calls: Calls, info: Mapping[str, Any]):
        self._calls, self._info = calls, info

    def state(self) -> ServingState:
        """See ``Engine.state``."""
        info = self._info
        session = info.get("session")
        adapters = self._calls.find(ADAPTERS) or {}
        return ServingState(
            "fastdeploy",
            str(info["version"]),
            info["weight_epoch"],
            info["boot_id"],
            info["dtype"],
            info.get("quantization"),
            info["fingerprint"],
            None if session is None else f"{session.get('session_id')} ({session.get('state', 'open')})",
            tuple(info.get("asleep", ())),
            tuple(one["lora_name"] for one in adapters.get("adapters", ())),
            tuple(one["name"] for one in info.get("replicas", ())),
        )

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """See ``Engine.digests``."""
        info = weight_info(self._calls, fingerprints=True)
        if _place(info) != _place(self._info):
            raise ChangedMeanwhile
        found: dict[str, str] = info["fingerprints"]
        return found

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """See ``Engine.digests_of``."""
        return {name: one.hex for name, one in weights.fingerprints().items()}

    def trimmed(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the whole tensor."""
        return values

    def values(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Engine.values``."""
        for first in range(0, len(names), EXPORTED):
            yield from self._exported(names[first : first + EXPORTED])

    def changed(self) -> str | None:
        """See ``Engine.changed``."""
        then, now = self._info, weight_info(self._calls)
        if _place(then) == _place(now):
            return None
        return f"weight_epoch {then['weight_epoch']} became {now['weight_epoch']} during the check"

    def _exported(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        try:
            reply = self._calls.send("GET", EXPORT, params={"tensors": list(names)})
        except FastDeployError as error:
            if error.code == "update_in_progress":
                raise ChangedMeanwhile from error
            raise
        if reply.headers["X-Weight-Epoch"] != str(self._info["weight_epoch"]):
            raise ChangedMeanwhile
        content = memoryview(reply.content)
        length = header_length(bytes(content[:8]), len(content), EXPORT)
        for name, entry in read_header(bytes(content[8 : 8 + length]), EXPORT).items():
            raw = content[entry.offset : entry.offset + entry.nbytes]
            yield name, np.frombuffer(raw, DTYPES[entry.dtype]).reshape(entry.shape)


def weight_info(calls: Calls, fingerprints: bool = False) -> dict[str, Any]:
    """Return the answer to GET /v1/weights. Raises ReplicasDiffer."""
    try:
        found: dict[str, Any] = calls.json("GET", WEIGHTS, params={"fingerprints": str(fingerprints).lower()})
    except FastDeployError as error:
        if error.code == "fleet_call_failed" and "served" in error.detail:
            raise ReplicasDiffer(error.message, error.detail["served"]) from error
        raise
    return found


def find_own(calls: Calls) -> OwnEngine | None:
    """Return the engine if the server is one of this package. Raises ReplicasDiffer, and the errors of ``Calls``."""
    try:
        info = weight_info(calls)
    except FastDeployError as error:
        if error.detail.get("status") in (404, 405):
            return None
        raise
    return OwnEngine(calls, info) if isinstance(info, dict) and "weight_epoch" in info else None


def _place(info: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(info[name] for name in PLACE)
