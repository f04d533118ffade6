"""What a step costs: seconds by the number of its rows, learned from the steps that were computed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable


class StepCost:
    """A model of the time of a step, which grows with its rows (tokens that the step computes) and with its keys (pairs
    of a row and a token that the row attends to):

        seconds = level * (curve(rows) + key_s * keys)

    ``curve`` goes through points at 1, 2, 3, 4, 6, 8, 12, 16, ... rows and is straight between them. Few rows are bound
    by the memory that holds the weights, many rows by arithmetic, so the curve has no formula. It never falls.

    ``level`` is the speed of the machine now. It follows a change in some ten steps, and the curve in some hundred. So
    a slow minute, which slows all steps, hardly changes the ratio of the cost of two steps. One step counts as at most
    ``CLIP`` times slower or faster than expected.

    key_s: seconds per key. ``learn_attention`` measures it.
    """

    CLIP = 2.0
    LEVEL_WEIGHT = 0.2  # of the newest step in ``level``
    CURVE_WEIGHT = 0.05  # of the newest step in a point of the curve, which is larger for its first steps

    def __init__(self) -> None:
        self.key_s = 0.0
        self._level = 1.0
        self._rows: list[int] = []  # the points of the curve, ascending
        self._seconds: list[float] = []  # of each point, not falling
        self._counts: list[int] = []  # observations of each point

    @property
    def known(self) -> bool:
        """Whether a step was observed. Before, every cost is 0."""
        return bool(self._rows)

    def cost(self, rows: int, keys: float = 0.0) -> float:
        """Return the expected seconds of a step."""
        return self._level * (self._curve(rows) + self.key_s * keys)

    def most(self, fits: Callable[[float], bool], rows: int, keys: float, start: int, limit: int) -> int:
        """Return how many tokens, at most ``limit``, of a sequence with ``start`` computed tokens can be added to a
        step of ``rows`` and ``keys`` so that its cost still ``fits``."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if fits(self.cost(rows + middle, keys + chunk_keys(start, middle))):
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, rows: int, seconds: float, keys: float = 0.0) -> None:
        """Learn from a step. rows: at least 1. seconds: above 0."""
        if not self._rows:
            net = max(seconds - self.key_s * keys, seconds / self.CLIP)
            self._insert(0, nearest_point(rows), net)
            return
        error = min(seconds / self.cost(rows, keys), self.CLIP)
        point = nearest_point(rows)
        i = bisect_left(self._rows, point)
        if i == len(self._rows) or self._rows[i] != point:
            # There is no older value to smooth this one with. It stays between those of its neighbours.
            at_least = self._seconds[i - 1] if i else 0.0
            at_most = self._seconds[i] if i < len(self._seconds) else math.inf
            self._insert(i, point, min(max(self._curve(point) * error, at_least), at_most))
            return
        error = max(error, 1 / self.CLIP) - 1.0
        self._counts[i] += 1
        weight = max(1.0 / (self._counts[i] + 1), self.CURVE_WEIGHT)
        self._seconds[i] *= 1.0 + weight * error
        self._level *= 1.0 + self.LEVEL_WEIGHT * error
        self._keep_growing(i)

    def learn_attention(self, seconds: float, rows: int, keys: float) -> None:
        """Take the seconds per key from a step of ``rows`` whose rows attend to ``keys`` together, after a step of as
        many rows with few keys was observed."""
        self.key_s = max(seconds / self._level - self._curve(rows), 0.0) / keys

    def _curve(self, rows: int) -> float:
        at, seconds = self._rows, self._seconds
        if not at:
            return 0.0
        i = bisect_left(at, rows)
        if i == len(at):  # a cost per row as at the last point: never too low, if more rows are no less efficient
            return seconds[-1] * rows / at[-1]
        if i == 0:
            return seconds[0]
        share = (rows - at[i - 1]) / (at[i] - at[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def _insert(self, i: int, point: int, seconds: float) -> None:
        self._rows.insert(i, point)
        self._seconds.insert(i, seconds)
        self._counts.insert(i, 1)

    def _keep_growing(self, i: int) -> None:
        """Move the other points so that the curve does not fall, after point ``i`` was set."""
        seconds = self._seconds
        for j in range(i - 1, -1, -1):
            if seconds[j] <= seconds[i]:
                break
            seconds[j] = seconds[i]
        for j in range(i + 1, len(seconds)):
            if seconds[j] >= seconds[i]:
                break
            seconds[j] = seconds[i]


def chunk_keys(start: int, count: int) -> float:
    """Return the keys of a chunk of ``count`` tokens behind ``start`` others: the tokens that each row attends to,
    summed over the rows."""
    return count * (start + count / 2)


def nearest_point(rows: int) -> int:
    """Return the number among 1, 2, 3, 4, 6, 8, 12, ... (powers of 2, and 1.5 times these) that is nearest to
    ``rows``, the larger one of two."""
    power = 1 << (rows.bit_length() - 1)
    return min((2 * power, power + power // 2, power), key=lambda point: abs(point - rows))
