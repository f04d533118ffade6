"""Grids: tests whose parameters have too many combinations for ``make test``. ``make test-slow`` runs those left out.

``@pytest.mark.covers("isa dtype rows", "rows bias")`` on a test says which parameters depend on one another in the
code under test. ``make test`` has every combination of the parameters within each group; it does not have each of them
beside every combination of another group. All other cases of the test are marked ``slow``.
"""

from __future__ import annotations

import pytest

Combination = tuple[str, tuple[int, ...]]


def combinations_of(item: pytest.Item, groups: tuple[str, ...]) -> set[Combination]:
    """Return, for each group, the values that a case has for the names in it."""
    values = item.callspec.params  # compared by identity: some cannot be hashed, and all cases share them
    return {(group, tuple(id(values[name]) for name in group.split())) for group in groups}


def covering(cases: list[set[Combination]]) -> set[int]:
    """Return the indices of few cases that together have all combinations: again and again that with the most new."""
    chosen, missing = set(), set().union(*cases)
    while missing:
        best = max(range(len(cases)), key=lambda i: len(cases[i] & missing))  # the first one of equals
        chosen.add(best)
        missing -= cases[best]
    return chosen


def mark_the_rest_slow(items: list[pytest.Item]) -> None:
    """Mark the cases that ``make test`` leaves out."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covers") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        [groups] = {case.get_closest_marker("covers").args for case in cases}
        kept = covering([combinations_of(case, groups) for case in cases])
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("slow")
