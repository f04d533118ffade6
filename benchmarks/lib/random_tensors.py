"""A safetensors file of random tensors that need not fit into memory together. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdeploy.testing.tensors import head, to_bfloat16


class RandomTensor(NamedTuple):
    """A tensor of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


def write_random_tensors(path: Path, tensors: Sequence[RandomTensor], seed: int) -> int:
    """Write the tensors, in this order, as a safetensors file of bfloat16. One tensor is in memory at a time. Return
    the number of values. The same seed gives the same bytes."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(head(((t.name, "BF16", t.shape, 2 * math.prod(t.shape)) for t in tensors), format="pt"))
        for tensor in tensors:
            values = rng.standard_normal(tensor.shape, dtype=np.float32) * tensor.std + tensor.mean
            file.write(to_bfloat16(values).tobytes())
    return sum(math.prod(tensor.shape) for tensor in tensors)
