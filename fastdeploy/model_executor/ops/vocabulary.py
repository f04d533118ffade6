"""What the ops over the vocabulary take and return: the draw, and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SampleBatch(NamedTuple):
    """Sampling parameters of each row, numpy arrays of length S. temperature 0: take the best token, the lowest id in
    a tie. top_k 0, top_p 1 and min_p 0 mean no limit. uniform: float64 in [0, 1), the random number of the row."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray


class Cutoff(NamedTuple):
    """The tokens of each row that top_k, top_p and min_p keep: those with a logit above ``logits`` [S], float32, and of
    those with this logit the ids up to ``ids`` [S], int32. They are all tokens of a row without limits, and of a row
    with temperature 0."""

    logits: np.ndarray
    ids: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Cutoff:
        """Return arrays for ``Ops.sample`` to write to."""
        return cls(np.empty(rows, np.float32), np.empty(rows, np.int32))

    def kept(self, row: int, logits: np.ndarray) -> np.ndarray:
        """Return the ids that are kept of one row, int64 ascending, without those of probability 0. logits: of this
        row, float32 [V]."""
        limit = self.logits[row]
        ids = np.flatnonzero(logits >= limit) if limit > -np.inf else np.flatnonzero(logits > limit)
        return ids[(logits[ids] > limit) | (ids <= self.ids[row])]

    def picked(self, rows: Sequence[int]) -> Cutoff:
        """Return the cutoff of these rows alone."""
        return Cutoff(self.logits[rows], self.ids[rows])


class TokenMasks(NamedTuple):
    """The ids that may be drawn from some rows; all may be drawn from the others. rows: int64 [M]. bits: uint32 [M, W],
    at least V bits in each; id i may be drawn if bit i % 32 of word i // 32 is 1."""

    rows: np.ndarray
    bits: np.ndarray

    def apply(self, logits: np.ndarray) -> None:
        """Set the logits [S, V] of the ids that may not be drawn to -inf."""
        for row, bits in zip(self.rows.tolist(), self.bits, strict=True):
            banned = np.unpackbits((~bits).view(np.uint8), count=logits.shape[1], bitorder="little").view(bool)
            logits[row][banned] = -np.inf


class LogprobBatch(NamedTuple):
    """What ``Ops.logprobs`` returns of each row. token_ids int32 [S]. top: how many of the best tokens.

    temperature: float32 [S], above 0; None: the logits as they are. cutoff: only these tokens have a probability; None:
    all of them. other_ids int32 [N], other_ends int64 [S]: further tokens, those of row i end at other_ends[i]."""

    token_ids: np.ndarray
    top: int = 0
    temperature: np.ndarray | None = None
    cutoff: Cutoff | None = None
    other_ids: np.ndarray | None = None
    other_ends: np.ndarray | None = None


class TokenLogprobs(NamedTuple):
    """Log probabilities, float32: of token_ids [S]; of the best tokens [S, top], best first, and the ids of these,
    int32 [S, top]; of the other ids [N]. ranks: 1 + number of larger logits than that of token_ids, int32 [S].

    A row with fewer tokens than ``top`` has -inf and id 0 in their place. A row that is not finite (see ``Ops.sample``)
    has NaN for its token and -inf for the others; no other row has NaN."""

    chosen: np.ndarray
    top_values: np.ndarray
    top_ids: np.ndarray
    ranks: np.ndarray
    others: np.ndarray
