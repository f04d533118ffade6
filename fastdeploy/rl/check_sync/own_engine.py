"""A server or a fleet of this package: fingerprints of tensors first, and then the tensors that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.fingerprint import ZERO
from fastdeploy.model_executor.safetensors_source import DTYPES, header_length, read_header
from fastdeploy.rl.check_sync.report import ServingState
from fastdeploy.rl.check_sync.serving import Calls, ChangedMeanwhile, ReplicasDiffer, typed
from fastdeploy.rl.check_sync.weights import TrainerWeights

WEIGHTS, EXPORT, ADAPTERS = "/v1/weights", "/v1/weights/export", "/v1/adapters"
EXPORTED = 200  # names in one URL


class WeightInfo(msgspec.Struct):
    """The answer to GET /v1/weights, as far as it is looked at."""

    version: str | int
    weight_epoch: int
    boot_id: str
    dtype: str
    fingerprint: str | None
    quantization: str | None = None
    session: dict[str, Any] | None = None
    asleep: tuple[str, ...] = ()
    replicas: tuple[dict[str, Any], ...] = ()
    fingerprints: dict[str, str] = {}
    checksums: dict[str, str] = {}

    @property
    def place(self) -> tuple[str, int]:
        """Two answers of one place are about the same weights."""
        return self.boot_id, self.weight_epoch


class _Adapters(msgspec.Struct):
    adapters: tuple[dict[str, Any], ...] = ()


class OwnEngine:
    """See ``Engine``."""

    method = "fingerprints of all tensors"
    zero: str | None = ZERO.hex
    has_fingerprints = True
    rows: Mapping[str, int] = {}

    def __init__(self, calls: Calls, info: WeightInfo):
        self._calls, self._info = calls, info

    def state(self) -> ServingState:
        """See ``Engine.state``."""
        info, session = self._info, self._info.session
        adapters = typed(self._calls.find(ADAPTERS) or {}, _Adapters, f"GET {ADAPTERS}").adapters
        return ServingState(
            "fastdeploy",
            str(info.version),
            info.weight_epoch,
            info.boot_id,
            info.dtype,
            info.quantization,
            info.fingerprint,
            None if session is None else f"{session.get('session_id')} ({session.get('state', 'open')})",
            info.asleep,
            tuple(str(one.get("lora_name")) for one in adapters),
            tuple(str(one.get("name")) for one in info.replicas),
        )

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """See ``Engine.digests``."""
        return self._info_now("fingerprints").fingerprints

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """See ``Engine.digests_of``."""
        return {name: one.hex for name, one in weights.fingerprints().items()}

    def damaged(self, trainer: TrainerWeights) -> list[str]:
        """See ``Engine.damaged``. The server computes checksums of its memory; fingerprints are of what it was sent."""
        served = self._info_now("checksums").checksums
        return [
            name
            for name, values in trainer.arrays(trainer.present)
            if served.get(name) != sha256(np.ascontiguousarray(values).data).hexdigest()
        ]

    def values(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Engine.values``."""
        for first in range(0, len(names), EXPORTED):
            yield from self._exported(names[first : first + EXPORTED])

    def changed(self) -> str | None:
        """See ``Engine.changed``."""
        then, now = self._info, weight_info(self._calls)
        if then.place == now.place:
            return None
        return f"weight_epoch {then.weight_epoch} became {now.weight_epoch} during the check"

    def _info_now(self, detail: str) -> WeightInfo:
        info = weight_info(self._calls, detail)
        if info.place != self._info.place:
            raise ChangedMeanwhile
        return info

    def _exported(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        try:
            reply = self._calls.send("GET", EXPORT, params={"tensors": list(names)})
        except FastDeployError as error:
            if error.code == "update_in_progress":
                raise ChangedMeanwhile from error
            raise
        if reply.headers.get("X-Weight-Epoch") != str(self._info.weight_epoch):
            raise ChangedMeanwhile
        content = memoryview(reply.content)
        length = header_length(bytes(content[:8]), len(content), EXPORT)
        for name, entry in read_header(bytes(content[8 : 8 + length]), EXPORT).items():
            raw = content[entry.offset : entry.offset + entry.nbytes]
            yield name, np.frombuffer(raw, DTYPES[entry.dtype]).reshape(entry.shape)


def weight_info(calls: Calls, detail: str | None = None) -> WeightInfo:
    """Return the answer to GET /v1/weights. detail: also "fingerprints" or "checksums" of all tensors. Raises
    ReplicasDiffer, and the errors of ``Calls``."""
    return typed(_raw_info(calls, {} if detail is None else {detail: "true"}), WeightInfo, f"GET {WEIGHTS}")


def _raw_info(calls: Calls, params: Mapping[str, str]) -> Any:
    try:
        return calls.json("GET", WEIGHTS, params=params)
    except FastDeployError as error:
        if error.code == "fleet_call_failed" and "served" in error.detail:
            raise ReplicasDiffer(error.message, error.detail["served"]) from error
        raise


def find_own(calls: Calls) -> OwnEngine | None:
    """Return the engine if the server is one of this package. Raises ReplicasDiffer, and the errors of ``Calls``."""
    try:
        info = _raw_info(calls, {})
    except FastDeployError as error:
        if error.detail.get("status") in (404, 405):
            return None
        raise
    if not isinstance(info, dict) or "weight_epoch" not in info:
        return None
    return OwnEngine(calls, typed(info, WeightInfo, f"GET {WEIGHTS}"))
