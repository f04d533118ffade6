"""The weights of a scripted server: named tensors in one dtype, replaced by sessions as on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.errors import BaseMismatch, WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.state_encoding import SHM

NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2", "U8": "u1"}


def read_safetensors(content: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, flat; bfloat16 as uint16 bits."""
    size = int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(content[8 + size + begin : 8 + size + end], NUMPY[entry["dtype"]])
    return tensors


def read_source(body: dict[str, Any]) -> bytes:
    """Return the safetensors file of a call that names shared memory, or a folder with one file."""
    if "shared_memory" in body:
        return (SHM / body["shared_memory"]).read_bytes()[: body["nbytes"]]
    return (Path(body["model_path"]) / "model.safetensors").read_bytes()


class FakeWeights:
    """Serves ``tensors``: flat, in ``dtype``, by name. tied: target by name of tensors that are not counted."""

    def __init__(self, dtype: str = "float32", tied: dict[str, str] | None = None):
        self.dtype = dtype
        self.tied = tied or {}
        self.tensors: dict[str, np.ndarray] = {}

    @property
    def fingerprint(self) -> str:
        return over_all({name: fingerprint(values) for name, values in self.tensors.items()})


class FakeStaging:
    """New weights, made from ``weights`` with the body of a begin. Raises BaseMismatch."""

    def __init__(self, weights: FakeWeights, begin: dict[str, Any]):
        self._weights = weights
        self._is_delta = "base_fingerprint" in begin
        if self._is_delta and begin["base_fingerprint"] != weights.fingerprint:
            raise BaseMismatch("another base", fingerprint=weights.fingerprint)
        assert not (self._is_delta and "partial" in begin)
        keeps = self._is_delta or begin.get("partial")
        self._new = dict(weights.tensors) if keeps else {}
        self._aliases: dict[str, np.ndarray] = {}
        self.arrived: list[str] = []

    def add(self, content: bytes, body: dict[str, Any]) -> dict[str, Any]:
        """Add a part. body: of /v1/weights/chunk. Raises WeightUpdateRefused."""
        fingerprints = body.get("fingerprints", {})
        fingerprints = json.loads(fingerprints) if isinstance(fingerprints, str) else fingerprints
        tensors = read_safetensors(content)
        assert not (twice := tensors.keys() & set(self.arrived)), twice
        assert fingerprints.keys() == tensors.keys() or not fingerprints
        self.arrived += tensors
        for name, values in tensors.items():
            new = self._apply(name, values, body.get("encoding", "dense"), body.get("compression", "none"))
            if name in fingerprints and fingerprint(new).hex != fingerprints[name]:
                raise WeightUpdateRefused(f"{name}: has another fingerprint")
        return {"tensors": len(tensors), "nbytes": len(content)}

    def _apply(self, name: str, values: np.ndarray, encoding: str, compression: str) -> np.ndarray:
        if encoding == "dense":
            assert compression == "none" and values.dtype != np.uint8
            wide = values.astype(np.float32) if values.dtype in (np.float16, np.float64) else values
            new = in_dtype(wide, self._weights.dtype)
        else:
            assert encoding == "overwrite" and self._is_delta and values.dtype == np.uint8
            new = self._new[name].copy()
            payload = delta_format.decompress(values, 10 * new.nbytes) if compression == "zstd" else values
            index, bits = delta_format.read_overwrite(payload, new.size, new.itemsize)
            new[index] = bits.view(new.dtype)
        (self._aliases if name in self._weights.tied else self._new)[name] = new
        return new

    def commit(self, expected: str | None) -> None:
        """Replace the weights. Raises WeightUpdateRefused."""
        for name, values in self._aliases.items():
            if not np.array_equal(values, self._new[self._weights.tied[name]]):
                raise WeightUpdateRefused(f"{name}: differs")
        found = over_all({name: fingerprint(values) for name, values in self._new.items()})
        if self._is_delta or expected is not None:
            assert expected is not None
            if found != expected:
                raise WeightUpdateRefused(f"fingerprint: expected {expected}, got {found}")
        self._weights.tensors = self._new
