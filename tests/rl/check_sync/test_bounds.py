"""The statistics of a behaviour check: they find what is larger than rounding, and what averages out of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastdeploy.rl.check_sync.bounds import (
    FLOAT32,
    NOISE,
    Tokens,
    evidence,
    fit,
    noise_ratio,
    prompts_of,
    smallest_found,
)

PROMPTS, LENGTH = 64, 63


def tokens(noise: float = 2.0, seed: int = 0, scale: float = 1.0) -> Tokens:
    """Return tokens of an engine with the right weights. The rounding of a token depends on its place."""
    rng = np.random.default_rng(seed)
    count = PROMPTS * LENGTH
    size = 0.01 * np.exp(0.3 * rng.standard_normal(count))
    exact = -8 + 3 * rng.standard_normal(count)
    own, found = (exact + factor * size * rng.standard_normal(count) for factor in (1.0, noise * scale))
    return Tokens(found, own, exact, prompts_of([LENGTH] * PROMPTS), scale=scale)


@pytest.mark.parametrize("scale", [1.0, FLOAT32])
def test_the_ratio_is_how_many_times_larger_the_rounding_is(scale):
    for noise in (0.5, 2.0, 8.0):
        assert noise_ratio(tokens(noise, scale=scale)) == pytest.approx(noise, rel=0.25)


def test_a_few_tokens_of_a_dense_model_that_are_far_off_are_found():
    right = tokens()
    wrong = right.found.copy()
    wrong[7] += 3.0
    assert noise_ratio(right) < NOISE < noise_ratio(right._replace(found=wrong))


def test_right_weights_raise_no_alarm_and_fit_no_older_ones():
    for seed in range(60):
        one, rng = tokens(2.4, seed), np.random.default_rng(seed + 1000)
        older = one.exact + 0.01 * rng.standard_normal(len(one.exact))
        assert not evidence(
            one, [older], {"attention": older, "MLP": one.exact + rng.standard_normal(len(one.exact))}
        ).differs


def test_a_stale_change_below_rounding_is_found_and_its_error_is_honest():
    """The standard error of the share is that of the shares which repeated checks give."""
    shares, errors = [], []
    for seed in range(30):
        one = tokens(2.0, seed)
        change = 0.01 * np.random.default_rng(7).standard_normal(len(one.exact))
        [found] = fit(one._replace(found=one.found + change), [one.exact + change])
        assert found.is_stale
        shares.append(found.share)
        errors.append(found.error)
    assert np.mean(shares) == pytest.approx(1, abs=0.05)
    assert np.std(shares) == pytest.approx(np.mean(errors), rel=0.5)


def test_an_update_that_was_applied_twice_is_found():
    one = tokens()
    change = 0.01 * np.random.default_rng(7).standard_normal(len(one.exact))
    said = evidence(one._replace(found=one.found - change), parts={"MLP": one.exact + change})
    assert said.differs and said.doubled == ["MLP"] and not said.lacking


def test_wrong_weights_of_another_kind_are_not_called_stale():
    one, rng = tokens(), np.random.default_rng(1)
    wrong = one._replace(found=one.found + 2 * rng.standard_normal(len(one.exact)))
    said = evidence(wrong, [one.exact + rng.standard_normal(len(one.exact))])
    assert said.differs and said.stale_by is None


def test_the_smallest_error_that_is_found_is_found_by_a_check():
    one, rng = tokens(), np.random.default_rng(2)
    response = rng.standard_normal(len(one.exact))
    size = smallest_found(one, response, rng, repeats=20)
    moved = [noise_ratio(one._replace(found=one.found + factor * size * response)) for factor in (0.5, 1.2)]
    assert moved[0] < NOISE < moved[1]
    assert smallest_found(one, 0 * response, rng, repeats=2) == math.inf
