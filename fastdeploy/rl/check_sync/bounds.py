"""The statistics of a behaviour check: which differences of log probabilities can be rounding, and which cannot.

Three arrays over the same tokens: ``found`` is what the engine said, ``exact`` a run of our own in float32, and ``own``
a run of our own in bfloat16, all with the same rounded weights. The differences ``own - exact`` show how much rounding
moves each token of this model. Another engine rounds at other places, so its differences are of the same shape, and
larger by a factor. docs/check-sync.md has the factors of real engines, and how often a check is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

NOISE = 4.0  # Rounding of an engine may be so many times our own. Measured: 1.3 to 2.3 (torch, vLLM).
# (share, own share): the value that ``share`` of the engine's differences exceed is compared with the value that
# ``own share`` of our differences exceed. In a Mixture of Experts, rounding sends some tokens to other experts. Twice
# the rounding does so for twice the tokens, and so an engine may have a larger share of these large differences.
LEVELS = ((0.5, 0.5), (0.2, 0.1), (0.04, 0.01), (0.004, 0.001))
LARGEST = 3.0  # The largest difference of all, of a dense model, may be so many times more than NOISE allows.
SPREAD = 6.0  # A quantile of n values varies by some 1 / sqrt(n) of itself; so many times as much is allowed.
FLOAT32 = 2.0**-12  # Rounding in float32, as a share of that in bfloat16. Measured with torch: 2**-13.5 to 2**-12.3.
FLOOR = 1e-6  # Of a log probability in float32: JSON and the last bit.
# Scale of Cauchy's weights in medians: 95 % of the efficiency of least squares (Holland, 1977).
CAUCHY = 2.385 / 0.6745
SURE = 5.0  # Standard errors. By chance, a fit is so far from 0 in fewer than 1 of 100,000 checks.
FOUND = 2.33  # Standard errors that 99 % of the fits lie above.
STALE = 0.5  # Share of an update that is missing, above which the older weights fit better than the new ones.
PART = 0.1  # The least share of an update that is called missing.


class Tokens(NamedTuple):
    """Log probabilities of the same tokens, float64. prompts: the number of the prompt of each token. dense: the model
    has no experts. scale: of ``own - exact``, FLOAT32 for an engine that serves float32."""

    found: np.ndarray
    own: np.ndarray
    exact: np.ndarray
    prompts: np.ndarray
    dense: bool = True
    scale: float = 1.0

    def only(self, places: np.ndarray) -> Tokens:
        """Return some of the tokens."""
        return self._replace(
            found=self.found[places],
            own=self.own[places],
            exact=self.exact[places],
            prompts=self.prompts[places],
        )


def noise_ratio(tokens: Tokens) -> float:
    """Return how many times larger than our own rounding the engine's differences are, at the worst level; at most
    NOISE for the same weights. Infinity if a log probability is not finite."""
    if not np.isfinite(tokens.found).all():
        return math.inf
    differences = np.abs(tokens.found - tokens.exact)
    own = np.abs(tokens.own - tokens.exact) * tokens.scale
    levels = np.array([(share, of_own, 1.0) for share, of_own in LEVELS] + [(0.0, 0.0, LARGEST)] * tokens.dense)
    shares, of_own, allowed = levels.T
    ratios = np.quantile(differences, 1 - shares) / np.maximum(np.quantile(own, 1 - of_own), FLOOR) / allowed
    return float(ratios.max() / (1 + SPREAD / math.sqrt(len(own))))


class Fit(NamedTuple):
    """How much of a change of the weights the engine lacks: ``share`` 0 = nothing, 1 = all of it, -1 = the engine has
    the change twice. error: standard error of the share. explains: what remains of the differences can be rounding.
    Other faults can look a little like an older value, but do not leave so little."""

    share: float
    error: float
    explains: bool = True

    @property
    def is_stale(self) -> bool:
        """Whether the older weights fit better than the new ones, and not by chance."""
        return self.explains and self.share > STALE and self.share > SURE * self.error

    @property
    def is_off(self) -> bool:
        """Whether the engine lacks the change or a part of it, or has more of it than the trainer."""
        return self.explains and abs(self.share) - SURE * self.error > PART

    @property
    def smallest(self) -> float:
        """The smallest missing share that is found in 99 % of the checks."""
        return PART + (SURE + FOUND) * self.error


def fit(tokens: Tokens, before: Sequence[np.ndarray]) -> list[Fit]:
    """Return how much of each change the engine lacks: of that from ``before[i]`` to ``exact``. before: float32 runs of
    our own, each with older values in other tensors.

    The differences are regressed on those that the older values would make. The noise of the engine averages out over
    the tokens, so a change is found that moves each token by less than rounding does. Tokens count less the further
    they are from the line (weights of Cauchy's likelihood, by iteration), and the error is that of independent prompts,
    not of independent tokens (a sandwich estimator with one cluster for each prompt)."""
    differences = tokens.found - tokens.exact
    moves = [one - tokens.exact for one in before]
    used = [i for i, move in enumerate(moves) if move.any()]
    fits = [Fit(0.0, math.inf)] * len(moves)
    if not used or not np.isfinite(differences).all():
        return fits
    changes = np.stack([moves[i] for i in used])
    floor = float(np.median(np.abs(tokens.own - tokens.exact))) * tokens.scale + FLOOR
    lines = [_line(differences, changes, start, floor) for start in (0.0, 1.0)]  # the likelihood can have two maxima
    shares, scale = min(lines, key=lambda line: line[1])
    rest = (differences - shares @ changes) / scale
    scores = changes * (rest / (1 + rest**2))
    by_prompt = np.stack([np.bincount(tokens.prompts, row) for row in scores])
    slopes = (changes * ((1 - rest**2) / (1 + rest**2) ** 2)) @ changes.T / scale
    inverse = np.linalg.pinv(slopes)
    errors = np.sqrt(np.diag(inverse @ (by_prompt @ by_prompt.T) @ inverse))
    explains = noise_ratio(tokens._replace(found=tokens.found - shares @ changes)) <= NOISE
    for i, share, error in zip(used, shares, errors, strict=True):
        fits[i] = Fit(float(share), float(error), explains)
    return fits


def _line(differences: np.ndarray, changes: np.ndarray, start: float, floor: float) -> tuple[np.ndarray, float]:
    """Return the shares [changes] whose sum of changes is nearest to the differences, from a first guess, and the scale
    of what remains. floor: of the median of what remains."""
    shares = np.full(len(changes), start)
    scale = 0.0
    for _ in range(20):
        rest = differences - shares @ changes
        scale = CAUCHY * max(float(np.median(np.abs(rest))), floor)
        weighted = changes / (1 + (rest / scale) ** 2)
        shares = np.linalg.pinv(weighted @ changes.T) @ (weighted @ differences)
    return shares, scale


class Evidence(NamedTuple):
    """The findings of the log probabilities about the weights. ratio: of ``noise_ratio``. older: the fit of each of the
    earlier weights, the latest first. parts: of the last update alone, the fit of each kind of tensors."""

    ratio: float
    older: Sequence[Fit] = ()
    parts: Mapping[str, Fit] = {}

    @property
    def stale_by(self) -> int | None:
        """The number of updates that the engine lacks; None if no earlier weights fit better than the trainer's."""
        fitting = [k for k, one in enumerate(self.older) if one.is_stale]
        return min(fitting, key=lambda k: abs(1 - self.older[k].share)) + 1 if fitting else None

    @property
    def lacking(self) -> list[str]:
        """The kinds of tensors of whose last update the engine lacks all or a part."""
        return [kind for kind, one in self.parts.items() if one.is_off and one.share > 0]

    @property
    def doubled(self) -> list[str]:
        """The kinds of tensors that the last update has moved further than those of the trainer."""
        return [kind for kind, one in self.parts.items() if one.is_off and one.share < 0]

    @property
    def differs(self) -> bool:
        """Whether the weights that serve are others than the trainer's."""
        return self.ratio > NOISE or any(one.is_off for one in (*self.older, *self.parts.values()))


def evidence(tokens: Tokens, older: Sequence[np.ndarray] = (), parts: Mapping[str, np.ndarray] = {}) -> Evidence:
    """Return what the log probabilities say. older, parts: runs of our own as for ``fit``, with all tensors of earlier
    weights, and with those of one kind from before the last update."""
    fits = [fit(tokens, [before])[0] for before in older]
    of_parts = dict(zip(parts, fit(tokens, list(parts.values())), strict=True))
    return Evidence(noise_ratio(tokens), fits, of_parts)


def smallest_found(tokens: Tokens, response: np.ndarray, rng: np.random.Generator, repeats: int = 100) -> float:
    """Return the size of an error that ``noise_ratio`` finds in 99 % of the checks. response: how much each log
    probability moves for an error of size 1; smaller errors move them in proportion. The checks are drawn from the
    prompts of this one, with replacement, and have the noise that this engine shows. Infinity: none is found."""
    of_prompt = [np.flatnonzero(tokens.prompts == prompt) for prompt in np.unique(tokens.prompts)]
    drawn = [
        np.concatenate([of_prompt[i] for i in rng.integers(0, len(of_prompt), len(of_prompt))]) for _ in range(repeats)
    ]

    def share_found(size: float) -> float:
        moved = tokens._replace(found=tokens.found + size * response)
        return float(np.mean([noise_ratio(moved.only(places)) > NOISE for places in drawn]))

    return first_true(lambda size: share_found(size) >= 0.99, 1e-6, 10.0)


def first_true(is_true: Callable[[float], bool], low: float, high: float, steps: int = 12) -> float:
    """Return the least value for which ``is_true``, by bisection of its logarithm; infinity if not even ``high``."""
    if not is_true(high):
        return math.inf
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return high


def prompts_of(lengths: Sequence[int]) -> np.ndarray:
    """Return the number of the prompt of each token, int64. lengths: tokens of each prompt."""
    return np.repeat(np.arange(len(lengths)), lengths)
