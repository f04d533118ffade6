"""The rotary embedding YaRN (arXiv 2309.00071), as _compute_yarn_parameters in modeling_rope_utils.py of transformers
computes it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.model_executor.model_config import count, positive, rope_settings

YARN = "yarn"
ORIGINAL_LENGTH = "original_max_position_embeddings"


class YarnRope(NamedTuple):
    """YaRN with the names of config.json. attention_factor: the tables are multiplied by it. mscale_all_dim: 0 if the
    config has none."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    mscale_all_dim: float

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Divide the frequencies theta^(-i / N), float32 [N] -> [N], of long waves by ``factor``.

        A wave is long if fewer than beta_slow of its periods fit into the original context. It is short, and does not
        change, if more than beta_fast fit. Between the two, its frequency is interpolated linearly in its index."""
        size = len(frequencies)

        def index(periods: float) -> float:
            """Return the index of the wave of which this many periods fit."""
            return size * math.log(self.original_max_position_embeddings / (periods * 2 * math.pi)) / math.log(theta)

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * size - 1)
        width = last - first if last != first else 0.001
        divided = np.clip((np.arange(size, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
        return (frequencies / np.float32(self.factor) * divided + frequencies * (1 - divided)).astype(np.float32)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN multiplies queries and keys for a context that is ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_yarn(raw: dict[str, Any]) -> YarnRope | None:
    """Return the YaRN of config.json, None if it has another rotary embedding. Raises InvalidField."""
    where, settings = rope_settings(raw)
    if settings.get("rope_type", settings.get("type")) != YARN:
        return None
    # transformers prefers the key at the top level. Without one, the context of the config is the original one.
    lengths = [one for one in (raw, settings) if ORIGINAL_LENGTH in one]
    length = count(lengths[0], ORIGINAL_LENGTH, "" if lengths[0] is raw else where) if lengths else None
    # transformers takes these for missing if they are null or 0.
    given = {key: settings[key] for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if settings.get(key)}
    factor, betas = positive(settings, "factor", where=where), {"beta_fast": 32.0, "beta_slow": 1.0}
    beta_fast, beta_slow = (positive(given, key, default, where) for key, default in betas.items())
    mscales = [positive(given, key, where=where) if key in given else 0.0 for key in ("mscale", "mscale_all_dim")]
    if settings.get("attention_factor") is not None:
        attention_factor = positive(settings, "attention_factor", where=where)
    elif all(mscales):
        attention_factor = magnitude(factor, mscales[0]) / magnitude(factor, mscales[1])
    else:
        attention_factor = magnitude(factor)
    truncate = settings.get("truncate", True)
    if type(truncate) is not bool:
        raise InvalidField(f"{where}.truncate", f"expected true or false, got {shown(truncate)}")
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=length or count(raw, "max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        attention_factor=attention_factor,
        mscale_all_dim=mscales[1],
    )
