"""Checkpoints of one safetensors file: random ones, slightly changed copies, and their values. Numpy only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WEIGHTS = "model.safetensors"


class RandomTensor(NamedTuple):
    """A tensor of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


class Entry(NamedTuple):
    """A tensor of a file. start, end: of its bytes, in the file."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


def entries(raw: bytes | bytearray) -> Iterator[Entry]:
    """Yield the tensors of a safetensors file, in its order."""
    base = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:base]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Entry(name, entry["dtype"], entry["shape"], base + start, base + end)


def head(header: dict[str, Any]) -> bytes:
    """Return the beginning of a safetensors file."""
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert finite float32 values to bfloat16 bit patterns (uint16), rounded to nearest even."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def to_float32(data: bytes | bytearray) -> np.ndarray:
    """Return the values of bfloat16 bytes."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def write_random_tensors(path: Path, tensors: Sequence[RandomTensor], seed: int) -> int:
    """Write the tensors, in this order, as a safetensors file. One tensor is in memory at a time. Return the number of
    values. The same seed gives the same bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        size = 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(head(header))
        for tensor in tensors:
            values = rng.standard_normal(tensor.shape, dtype=np.float32) * tensor.std + tensor.mean
            file.write(to_bfloat16(values).tobytes())
    return offset // 2


def float32_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of ``folder``/model.safetensors, which are bfloat16, as float32, sorted by name."""
    raw = (folder / WEIGHTS).read_bytes()
    return {e.name: to_float32(raw[e.start : e.end]).reshape(e.shape) for e in sorted(entries(raw))}


def perturbed_copy(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copy ``source`` (one safetensors file of bfloat16 or float32) to the new folder ``target``, each weight times
    1 + scale * N(0, 1), as a trainer's next step would publish. Raises ValueError for another dtype."""
    shutil.copytree(source, target)
    raw = bytearray((source / WEIGHTS).read_bytes())
    rng = np.random.default_rng(seed)
    for entry in entries(raw):
        data = raw[entry.start : entry.end]
        if entry.dtype not in ("BF16", "F32"):
            raise ValueError(f"{entry.name}: expected BF16 or F32, got {entry.dtype}")
        values = to_float32(data) if entry.dtype == "BF16" else np.frombuffer(data, "<f4")
        values = values * (1 + scale * rng.standard_normal(values.shape, np.float32))
        raw[entry.start : entry.end] = (to_bfloat16(values) if entry.dtype == "BF16" else values).tobytes()
    (target / WEIGHTS).write_bytes(raw)
