"""A token's random number is uniform, and depends on seed, choice and position only."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.worker.sampler import uniform

COUNT = 1 << 16


@pytest.mark.parametrize("word", range(3), ids=["seed", "choice", "position"])
def test_numbers_along_each_word_of_the_key_are_uniform_and_neighbours_independent(word):
    words = np.zeros((3, COUNT), np.int64)
    words[word] = np.arange(COUNT)
    numbers = uniform(*words)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = [np.histogram(numbers, bins, (0.0, 1.0))[0] for bins in (16, 256)]
    counts.append(np.histogram2d(numbers[:-1], numbers[1:], 16, [[0, 1], [0, 1]])[0])
    for found in counts:
        expected, degrees = found.sum() / found.size, found.size - 1
        chi_square = ((found - expected) ** 2 / expected).sum()
        assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_the_words_of_the_key_are_not_interchangeable():
    keys = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 6), (6, 0, 0), (0, 6, 0)]
    assert len(set(uniform(*np.array(keys).T).tolist())) == len(keys)


def test_a_number_does_not_depend_on_its_batch():
    seeds, choices, positions = np.array([7, 2**63 - 1, 0]), np.array([0, 3, 1]), np.array([5, 9, 100000])
    together = uniform(seeds, choices, positions)
    alone = [uniform(*(w[i : i + 1] for w in (seeds, choices, positions)))[0] for i in range(3)]
    assert together.tolist() == alone


def test_every_release_draws_the_same_number_for_the_same_key():
    assert uniform(np.array([1234]), np.array([1]), np.array([77]))[0] == 0.9213355076510377
