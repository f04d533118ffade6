"""A token's random number is uniform, and depends on seed, choice and position only."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.model_executor.rng import uniform

COUNT = 1 << 16


def _axis(which: str) -> np.ndarray:
    """Numbers along one word of the key, the other two fixed."""
    words = {word: np.zeros(COUNT, np.int64) for word in ("seed", "choice", "position")}
    words[which] = np.arange(COUNT)
    return uniform(*words.values())


@pytest.mark.parametrize("which", ["seed", "choice", "position"])
def test_numbers_along_each_word_of_the_key_are_uniform(which):
    numbers = _axis(which)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    for bins in (16, 256):
        counts, _ = np.histogram(numbers, bins, (0.0, 1.0))
        expected = COUNT / bins
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - (bins - 1)) < 5 * np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("which", ["seed", "choice", "position"])
def test_neighbouring_keys_are_independent(which):
    numbers = _axis(which)
    pairs, _, _ = np.histogram2d(numbers[:-1], numbers[1:], 16, [[0, 1], [0, 1]])
    expected = (COUNT - 1) / 256
    assert abs(((pairs - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(2 * 255)


def test_the_words_of_the_key_are_not_interchangeable():
    keys = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 6), (6, 0, 0), (0, 6, 0)]
    assert len(set(uniform(*np.array(keys).T).tolist())) == len(keys)


def test_a_number_does_not_depend_on_its_batch():
    seeds, choices, positions = np.array([7, 2**63 - 1, 0]), np.array([0, 3, 1]), np.array([5, 9, 100000])
    together = uniform(seeds, choices, positions)
    alone = [uniform(*(w[i : i + 1] for w in (seeds, choices, positions)))[0] for i in range(3)]
    assert together.tolist() == alone


def test_the_function_is_frozen():
    # a new release must draw the same tokens for the same seed
    assert uniform(np.array([1234]), np.array([1]), np.array([77]))[0] == 0.9213355076510377
