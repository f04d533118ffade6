"""Checks of the flags of a measurement."""

from __future__ import annotations

import argparse

from fastdeploy.core.errors import InvalidField


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise InvalidField for the first of these flags that was given and is not above 0."""
    for name in names:
        if (value := getattr(args, name)) is not None and not value > 0:
            raise InvalidField(name, f"expected a number above 0, got {value}")
