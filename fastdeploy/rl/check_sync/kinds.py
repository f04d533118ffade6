"""Kinds of tensors by their names, and errors of a known size in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the tensors that play the same part in each layer, and for each expert. A kind is such a name
    with * in place of the numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return found


def with_error(
    tensors: Mapping[str, np.ndarray], names: Iterable[str], size: float, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return the tensors with normal noise added to those in ``names``: of ``size`` times the root mean square of the
    tensor."""
    rng, changed = np.random.default_rng(seed), dict(tensors)
    for name in names:
        values = tensors[name]
        scale = size * float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        changed[name] = (values + scale * rng.standard_normal(values.shape)).astype(np.float32)
    return changed
