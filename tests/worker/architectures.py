"""Cases of tests whose behaviour depends on the architecture of a checkpoint, and not on what else a spec varies."""

from __future__ import annotations

from typing import Any

import pytest

from support.runner_ops import with_ops
from support.specs import SPECS

# The first checkpoint of each architecture and dtype. The others differ from it in widths, biases or a tied head.
FIRST = {(spec.architecture, spec.dtype): name for name, spec in reversed(SPECS.items())}.values()


def with_ops_by_architecture() -> list[Any]:
    """Return ``with_ops`` of all checkpoints. Those that are not the first of their architecture are slow."""
    return [
        one if name in FIRST else pytest.param(ops, name, marks=[*one.marks, pytest.mark.slow], id=one.id)
        for one in with_ops(SPECS)
        for ops, name in [one.values]
    ]
