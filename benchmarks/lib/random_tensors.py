"""Files of seeded random bfloat16 tensors. Numpy only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class RandomTensor(NamedTuple):
    """A tensor of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert finite float32 values to bfloat16 bit patterns (uint16), rounded to nearest even."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_random_tensors(path: Path, tensors: Sequence[RandomTensor], seed: int) -> int:
    """Write the tensors, in this order, as a safetensors file. One tensor is in memory at a time. Return the number of
    values. The same seed gives the same bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        size = 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        for tensor in tensors:
            values = rng.standard_normal(tensor.shape, dtype=np.float32) * tensor.std + tensor.mean
            file.write(to_bfloat16(values).tobytes())
    return offset // 2
