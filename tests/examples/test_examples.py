"""The package ``examples`` of the repository's root is found, and not this folder of tests."""

from __future__ import annotations

from pathlib import Path

import examples

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_of_this_name_is_the_one_with_the_programs():
    assert examples.__file__ == str(ROOT / "examples" / "__init__.py")
