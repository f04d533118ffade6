"""The learned cost of a step, on machines that are formulas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.scheduler.step_cost import READ, StepCost, chunk_keys, nearest_point


def machine(memory_s: float, row_s: float):
    """Return the seconds of a step of so many rows: bound by memory, then by arithmetic."""
    return lambda rows: max(memory_s, row_s * rows) + row_s


def learned(seconds, rows, times: int = 1) -> StepCost:
    cost = StepCost()
    for _ in range(times):
        for count in rows:
            cost.observe(seconds(count), count)
    return cost


machines = st.builds(machine, st.floats(0.001, 0.1), st.floats(0.00001, 0.01))


@given(machines, st.lists(st.integers(1, 4000), min_size=1, max_size=40))
def test_the_cost_grows_and_is_near_what_was_observed(seconds, rows):
    cost = learned(seconds, rows, times=60)
    costs = [cost.cost(count) for count in range(1, 5000, 7)]
    assert costs == sorted(costs)
    # Two numbers of rows that share a point differ by less than half.
    assert all(seconds(count) / 1.6 < cost.cost(count) < seconds(count) * 1.6 for count in rows)


def test_costs_between_and_beyond_observed_rows():
    cost = learned(machine(0.02, 0.001), [1, 16, 32, 64, 128])
    assert cost.cost(1) == pytest.approx(0.021)
    assert cost.cost(16) == pytest.approx(0.021)
    assert cost.cost(48) == pytest.approx(0.049)
    assert cost.cost(256) == pytest.approx(0.258)


def test_nothing_observed_costs_nothing():
    assert StepCost().cost(100) == 0.0 and not StepCost().known


def test_a_single_slow_step_is_forgotten_in_some_ten_steps():
    seconds = machine(0.02, 0.001)
    cost = learned(seconds, [8, 32], times=20)
    cost.observe(100.0, 32)
    assert cost.cost(32) < 1.35 * seconds(32)
    for _ in range(12):
        cost.observe(seconds(32), 32)
    assert cost.cost(32) == pytest.approx(seconds(32), rel=0.05)
    assert cost.cost(8) == pytest.approx(seconds(8), rel=0.05)


def test_a_slow_step_does_not_make_its_neighbours_too_dear_to_be_tried():
    """A step of 16 rows that was slow in the warm-up: those of 9 to 15 rows are tried, and correct it."""
    seconds = machine(0.02, 0.001)
    cost = learned(seconds, [1, 8])
    cost.observe(10.0, 16)
    cost.observe(10.0, 32)
    for _ in range(60):
        rows = 8 + cost.most(1.5 * cost.cost(8), 8, 0, 0.0, 0, 1000)
        cost.observe(seconds(rows), rows)
    assert 24 <= rows <= 32


def test_the_cost_follows_a_machine_that_has_changed_for_good():
    cost = learned(machine(0.02, 0.001), [8, 32, 128], times=40)
    other = machine(0.06, 0.0005)
    for _ in range(200):
        for rows in (8, 32, 128):
            cost.observe(other(rows), rows)
    for rows in (8, 32, 128):
        assert cost.cost(rows) == pytest.approx(other(rows), rel=0.05)


def test_noise_averages_out():
    seconds, noise = machine(0.02, 0.001), random.Random(0)
    cost = StepCost()
    for _ in range(500):
        rows = noise.randrange(1, 300)
        cost.observe(seconds(rows) * noise.uniform(0.8, 1.25), rows)
    for rows in (1, 20, 100, 250):
        assert cost.cost(rows) == pytest.approx(seconds(rows), rel=0.2)


def test_attention_costs_by_the_keys_and_logits_by_the_sampled_rows():
    cost = learned(machine(0.02, 0.001), [1, 32, 64])
    assert cost.cost(32, keys=1000.0) == cost.cost(32)
    cost.key_s, cost.sampled_s = 1e-7, 0.0005
    assert cost.cost(64, keys=200_000.0) == pytest.approx(0.065 + 0.02)
    assert cost.cost(64, sampled=64) == pytest.approx(0.065 + 0.032)
    for _ in range(100):
        cost.observe(0.065 + 0.02, 64, keys=200_000.0)
    assert cost.cost(64) == pytest.approx(0.065)


@given(machines, st.integers(0, 64), st.integers(0, 3000), st.floats(0.0, 0.5))
def test_the_most_tokens_are_those_that_just_fit(seconds, rows, start, limit_s):
    cost = learned(seconds, [2**i for i in range(12)])
    cost.key_s, cost.sampled_s = seconds(32) / 100_000.0, seconds(32) / 100

    def fits(count: int) -> bool:
        return cost.cost(rows + count, rows, chunk_keys(start, count)) <= limit_s

    most = cost.most(limit_s, rows, rows, 0.0, start, 500)
    assert most == 0 or fits(most)
    assert most == 500 or not fits(most + 1)


def test_the_keys_of_a_chunk():
    assert chunk_keys(100, 1) == pytest.approx((READ + 1) * 101, rel=0.01)
    assert chunk_keys(0, 512) == pytest.approx(sum(range(1, 513)), rel=0.02)


def test_points_are_powers_of_two_and_between_them():
    assert [nearest_point(rows) for rows in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16]
