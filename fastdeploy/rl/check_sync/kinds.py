"""Kinds of tensors by their names, and errors of a known size in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

KINDS = (
    ("embedding", r"embed_tokens"),
    ("head", r"lm_head"),
    ("experts", r"\.experts\."),
    ("router", r"\.gate\.|\.router\.|e_score_correction_bias"),
    ("norms", r"norm"),
    ("attention", r"self_attn"),
    ("MLP", r"mlp"),
)


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each kind, in the order of KINDS; of other tensors under "others"."""
    found: dict[str, list[str]] = {kind: [] for kind in (*(kind for kind, _ in KINDS), "others")}
    for name in names:
        found[next((kind for kind, pattern in KINDS if re.search(pattern, name)), "others")].append(name)
    return {kind: some for kind, some in found.items() if some}


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
