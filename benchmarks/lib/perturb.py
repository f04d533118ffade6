"""Copying a checkpoint with slightly changed weights, as a trainer's next step would publish."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

WEIGHTS = "model.safetensors"


def perturbed_copy(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copy ``source`` (one safetensors file) to the new folder ``target``, each weight times 1 + scale * N(0, 1).

    Supports bfloat16 and float32. Raises KeyError with the name of another dtype.
    """
    shutil.copytree(source, target)
    raw = bytearray((source / WEIGHTS).read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    rng = np.random.default_rng(seed)
    for entry in header.values():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        raw[start:end] = {"BF16": _bfloat16, "F32": _float32}[entry["dtype"]](bytes(raw[start:end]), rng, scale)
    (target / WEIGHTS).write_bytes(raw)


def _float32(data: bytes, rng: np.random.Generator, scale: float) -> bytes:
    values = np.frombuffer(data, "<f4")
    return (values * (1 + scale * rng.standard_normal(values.shape, np.float32))).astype("<f4").tobytes()


def _bfloat16(data: bytes, rng: np.random.Generator, scale: float) -> bytes:
    """Perturb bfloat16 values as float32, then cut off the lower 16 bits, which rounds towards zero."""
    wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
    return (np.frombuffer(_float32(wide, rng, scale), "<u4") >> 16).astype("<u2").tobytes()
