"""The random number of a token: a pure function of (seed, choice index, absolute position). So neither the batch nor an
abort followed by a resubmission changes which token is drawn.

The hash is three rounds of the splitmix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), one per word of the key.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) with 53 random bits, for integer arrays of one length with values in [0, 2^63)."""
    state = np.zeros(len(seeds), np.uint64)
    for word in (seeds, choices, positions):
        state = _mix((state ^ np.asarray(word).astype(np.uint64)) + _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
