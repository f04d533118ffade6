"""Checks of the selection of cases in support/grids.py."""

from __future__ import annotations

import itertools

import pytest

from support.grids import covering

pytest_plugins = ("pytester",)


def test_few_cases_have_every_combination_within_each_group():
    groups = [(0, 1), (1, 2), (2, 3)]
    grid = list(itertools.product(range(4), range(3), range(4), range(2)))
    cases = [{(group, tuple(case[i] for i in group)) for group in groups} for case in grid]
    chosen = covering(cases)
    assert set().union(*(cases[i] for i in chosen)) == set().union(*cases)
    assert len(chosen) <= 14 and len(grid) == 96  # 4 x 3 cases are the least


def test_cases_without_a_common_combination_are_all_chosen():
    assert covering([{("a", (i,))} for i in range(5)]) == set(range(5))


MODULE = """
import pytest

@pytest.mark.covers("isa rows", "rows bias")
@pytest.mark.parametrize("isa", ["old", "new"])
@pytest.mark.parametrize("rows", [[1], [2], pytest.param([3], marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_grid(isa, rows, bias): ...

@pytest.mark.parametrize("rows", [1, 2])
def test_another(rows): ...
"""
CONFTEST = """
import pytest
from support.grids import mark_the_rest_slow

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_the_rest_slow(items)
"""


def test_the_default_suite_has_the_covering_cases_and_the_slow_tests_have_the_others(pytester: pytest.Pytester):
    pytester.makepyfile(test_grid=MODULE, conftest=CONFTEST)
    pytester.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=4 + 2, deselected=8)
    pytester.runpytest_inprocess("-m", "slow").assert_outcomes(passed=8, deselected=4 + 2)
