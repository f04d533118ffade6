"""What a step costs: seconds by the number of its rows, learned from the steps that were computed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

from fastdeploy.core.plan import ScheduledChunk

# Rows whose attention takes as long as reading their KV from memory once. Measured with q05 on two cores of Zen 5:
# 1.5 with AVX2, 3 with AVX-512, 3.5 with AVX512-BF16.
READ = 3


class StepCost:
    """A model of the time of a step. rows: tokens that the step computes. sampled: the rows behind which a token is
    sampled, whose logits take time. keys: pairs of a row and a token that the row attends to, see ``chunk_keys``.

        seconds = curve(rows) + sampled_s * sampled + key_s * keys

    ``curve`` goes through points at 1, 2, 3, 4, 6, 8, 12, 16, ... rows and is straight between them. Few rows are bound
    by the memory that holds the weights, many rows by arithmetic, so it has no formula. It never falls, and never grows
    faster than ``rows ** GROWTH``. So a slow step at one point cannot make the next one look too dear to be tried.

    sampled_s, key_s: seconds per sampled row and per key, which the warm-up measures.
    """

    WEIGHT = 0.3  # of the newest step in the points beside it
    CLIP = 2.0  # a step counts as at most so many times slower or faster than expected
    GROWTH = 1.25  # more than 1: large products make less use of the caches

    def __init__(self) -> None:
        self.sampled_s = self.key_s = 0.0
        self._rows: list[int] = []  # the points of the curve, ascending
        self._seconds: list[float] = []  # of each point

    @property
    def known(self) -> bool:
        """Whether a step was observed. Before, every cost is 0."""
        return bool(self._rows)

    def cost(self, rows: int, sampled: int = 0, keys: float = 0.0) -> float:
        """Return the expected seconds of a step."""
        return self._curve(rows) + self.sampled_s * sampled + self.key_s * keys

    def most(self, limit_s: float, rows: int, sampled: int, keys: float, start: int, most: int) -> int:
        """Return how many tokens, at most ``most``, of a sequence with ``start`` computed tokens can be added to a step
        of ``rows``, ``sampled`` and ``keys`` so that it costs at most ``limit_s``."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost(rows + middle, sampled, keys + chunk_keys(start, middle)) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, seconds: float, rows: int, sampled: int = 0, keys: float = 0.0) -> None:
        """Learn from a step. seconds: above 0. rows: at least 1."""
        point, at = nearest_point(rows), self._rows
        if not at:
            net = seconds - self.sampled_s * sampled - self.key_s * keys
            self._insert(0, point, max(net, seconds / self.CLIP))
            return
        ratio = min(seconds / self.cost(rows, sampled, keys), self.CLIP)
        i = bisect_left(at, point)
        if i == len(at) or at[i] != point:  # no older value to smooth this one with, but between its neighbours
            least = self._seconds[i - 1] if i else 0.0
            most = self._seconds[i] if i < len(at) else math.inf
            self._insert(i, point, min(max(self._curve(point) * ratio, least), most))
            return
        error = max(ratio, 1 / self.CLIP) - 1.0
        # The points on both sides of the rows move by their shares. That of the nearer one is at least a half.
        beside = i + 1 if rows > point else i - 1
        share = 0.0
        if 0 <= beside < len(at) and rows != point:
            share = (rows - point) / (at[beside] - point)
            self._seconds[beside] *= 1.0 + self.WEIGHT * share * error
        self._seconds[i] *= 1.0 + self.WEIGHT * (1.0 - share) * error
        self._constrain(i)

    def _curve(self, rows: int) -> float:
        at, seconds = self._rows, self._seconds
        if not at:
            return 0.0
        i = bisect_left(at, rows)
        if i == len(at):  # a cost per row as at the last point
            return seconds[-1] * rows / at[-1]
        if i == 0:
            return seconds[0]
        share = (rows - at[i - 1]) / (at[i] - at[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def _insert(self, i: int, point: int, seconds: float) -> None:
        self._rows.insert(i, point)
        self._seconds.insert(i, seconds)

    def _constrain(self, i: int) -> None:
        """Move the other points to where the curve grows, but not faster than it may, beside point ``i``."""
        for j in range(i - 1, -1, -1):
            least = self._seconds[j + 1] * (self._rows[j] / self._rows[j + 1]) ** self.GROWTH
            self._seconds[j] = min(max(self._seconds[j], least), self._seconds[j + 1])
        for j in range(i + 1, len(self._rows)):
            most = self._seconds[j - 1] * (self._rows[j] / self._rows[j - 1]) ** self.GROWTH
            self._seconds[j] = min(max(self._seconds[j], self._seconds[j - 1]), most)


def chunk_keys(start: int, count: int) -> float:
    """Return the keys of a chunk of ``count`` tokens behind ``start`` others: the tokens that each row attends to,
    summed over the rows, and READ rows more, which is what reading the KV from memory costs."""
    return (READ + count) * (start + count / 2)


def decoded_tokens(rows: int, keys: float) -> float:
    """Return the tokens whose KV a step reads that computes one token of each of ``rows`` sequences. keys: of the
    step."""
    return keys / (READ + 1) + rows / 2


def step_work(chunks: Iterable[ScheduledChunk]) -> tuple[int, int, float]:
    """Return the rows, the sampled rows and the keys of a step, see StepCost."""
    rows, sampled, keys = 0, 0, 0.0
    for chunk in chunks:
        rows += chunk.count
        sampled += 1 + chunk.drafted if chunk.sample else 0
        keys += chunk_keys(chunk.start, chunk.count)
    return rows, sampled, keys


def nearest_point(rows: int) -> int:
    """Return the number among 1, 2, 3, 4, 6, 8, 12, ... (powers of 2, and 1.5 times these) that is nearest to
    ``rows``, the larger one of two."""
    power = 1 << (rows.bit_length() - 1)
    return min((2 * power, power + power // 2, power), key=lambda point: abs(point - rows))
