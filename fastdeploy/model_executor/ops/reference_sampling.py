"""Draws and log probabilities of one row in the reference ops."""

from __future__ import annotations

import numpy as np

from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch


def draw(row: np.ndarray, batch: SampleBatch, i: int) -> tuple[int, tuple[float, int]]:
    """Draw one token id from one row of logits in float64; see ``Ops.sample``. Returns it and the cutoff."""
    everything = -np.inf, len(row)
    if not np.isfinite(row.max()):  # numpy returns NaN as the largest value
        return -1, everything
    if batch.temperature[i] == 0:
        return int(row.argmax()), everything
    scaled = row.astype(np.float64) / batch.temperature[i]
    probabilities = np.exp(scaled - scaled.max())
    top_k, top_p, min_p = int(batch.top_k[i]), float(batch.top_p[i]), float(batch.min_p[i])
    limited = 0 < top_k < len(row) or top_p < 1.0
    if limited:
        order = np.argsort(-scaled, kind="stable")[: top_k or None]
        mass = np.cumsum(probabilities[order])
        kept = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1] if top_p < 1.0 else order
        probabilities = np.where(np.isin(np.arange(len(row)), kept), probabilities, 0.0)
    if min_p > 0.0:
        probabilities = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)
    cumulative = np.cumsum(probabilities)
    # side="right" never finds a token of probability 0. The minimum is needed where uniform * total rounds up to total.
    drawn = int(np.searchsorted(cumulative, batch.uniform[i] * cumulative[-1], side="right"))
    left = np.flatnonzero(probabilities)
    least = left[row[left] == row[left].min()][-1]  # the last of the kept, best first
    cutoff = (float(row[least]), int(least)) if limited or min_p > 0.0 else everything
    return min(drawn, int(left[-1])), cutoff


def inside(row: np.ndarray, cutoff: Cutoff | None, i: int) -> np.ndarray:
    """Return the ids of row ``i`` that have a probability, ascending."""
    return np.flatnonzero(row > -np.inf) if cutoff is None else cutoff.kept(i, row)


def scores(row: np.ndarray, batch: LogprobBatch, i: int) -> np.ndarray:
    """Return the log softmax of row ``i``, whose largest logit is finite, in float64."""
    values = row.astype(np.float64)
    if batch.temperature is not None:
        values = (row - row.max()).astype(np.float64) / batch.temperature[i]
    kept = values[inside(row, batch.cutoff, i)]
    return values - (kept.max() + np.log(np.exp(kept - kept.max()).sum()))
