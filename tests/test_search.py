"""Checks of the settings of hypothesis in support/search.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from support import search


def drawn() -> list[int]:
    """Return the examples of a test in their order."""
    found: list[int] = []

    @settings(derandomize=True)
    @given(st.integers())
    def draw(number: int) -> None:
        found.append(number)

    draw()
    return found


def test_examples_do_not_depend_on_the_modules_that_other_tests_have_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    module = ModuleType("imported")
    module.__file__ = str(tmp_path_factory.mktemp("package") / "imported.py")
    Path(module.__file__).write_text(f"SIZES = {[-1001 - i for i in range(500)]}\n")
    monkeypatch.setattr(providers, "_get_local_constants", providers._get_local_constants)  # put back at the end
    search.leave_out_constants()
    before = drawn()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert drawn() == before


def test_the_settings_are_the_same_on_a_machine_that_hypothesis_takes_for_ci():
    expected = repr(settings.default)
    settings.load_profile("ci")
    search.configure()
    assert repr(settings.default) == expected
    assert "deadline=None" in expected and f"derandomize={not search.FACTOR}" in expected
