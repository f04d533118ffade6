"""The formulas of the example trainer, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from examples.async_grpo.config import Settings
from examples.async_grpo.grpo import advantages, mismatch, token_loss
from examples.async_grpo.learner import mismatches


def losses(current, behaviour, advantage, reference=None, kl_weight=0.0):
    settings = Settings(clip_low=0.2, clip_high=0.28, max_ratio=3.0, kl_weight=kl_weight)
    found = paddle.to_tensor(current, "float32", stop_gradient=False)
    reference = None if reference is None else paddle.to_tensor(reference, "float32")
    behaviour, advantage = paddle.to_tensor(behaviour, "float32"), paddle.to_tensor(advantage, "float32")
    result = token_loss(found, behaviour, reference, advantage, settings)
    result.loss.backward()
    return result, found.grad.numpy()


def test_an_advantage_is_the_distance_from_the_mean_in_deviations():
    # mean 0.25, deviation sqrt(3) / 4
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], rel=1e-3)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_with_equal_rewards_has_no_advantage(reward):
    assert not advantages([reward] * 4).any()


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    result, gradient = losses([-1.0, -2.0], [-1.0, -2.0], [1.5, -0.5])
    assert float(result.loss) == pytest.approx(-0.5)  # -(1.5 - 0.5) / 2
    assert gradient == pytest.approx([-0.75, 0.25])
    assert float(result.clipped) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.2, 1.0, 1.2, 1.2),  # inside the bounds
        (1.5, 1.0, 1.28, 0.0),  # better than allowed: no further reward
        (0.5, 1.0, 0.5, 0.5),  # worse: the way back stays open
        (0.5, -1.0, -0.8, 0.0),
        (1.5, -1.0, -1.5, -1.5),
        (10.0, -1.0, -3.0, 0.0),  # counts as max_ratio
    ],
)
def test_a_token_is_weighted_by_its_ratio_within_the_bounds(ratio, advantage, gain, slope):
    result, gradient = losses([-1.0 + math.log(ratio)], [-1.0], [advantage])
    assert float(result.loss) == pytest.approx(-gain, rel=1e-5)
    assert gradient == pytest.approx([-slope], rel=1e-5)


def test_the_kl_pulls_towards_the_reference():
    result, gradient = losses([-1.0], [-1.0], [0.0], reference=[-1.5], kl_weight=2.0)
    assert float(result.kl) == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert float(result.loss) == pytest.approx(2 * float(result.kl))
    assert gradient == pytest.approx([2 * (1 - math.exp(-0.5))])


def test_mismatch_of_equal_logprobs_is_exactly_nothing():
    same = np.array([-0.5, -3.25], np.float32)
    assert mismatch(same, same) == {"tokens": 2, "max_abs": 0.0, "kl": 0.0, "ratio_max": 1.0}
    assert mismatch(same[:0], same[:0]) is None


def test_mismatch_names_the_largest_difference():
    found = mismatch(np.array([-1.0, -2.5], np.float32), np.array([-1.0, -2.0], np.float32))
    assert found is not None
    assert found["max_abs"] == 0.5
    assert found["ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["kl"] == pytest.approx((math.exp(-0.5) + 0.5 - 1) / 2)


def test_only_answers_that_the_present_weights_made_as_a_whole_count_as_mismatch():
    here = [np.array([True, True]), np.array([False, True]), np.array([False])]
    server = np.zeros(5, np.float32)
    trainer = np.array([0.0, 0.0, 9.0, 0.5, 9.0], np.float32)
    found = mismatches(here, trainer, server)
    assert found["mismatch"] == {"tokens": 2, "max_abs": 0.0, "kl": 0.0, "ratio_max": 1.0}
    assert (found["stale_kv"]["tokens"], found["stale_kv"]["max_abs"]) == (1, 0.5)
