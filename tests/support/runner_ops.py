"""The ops that tests of a model runner take, and the cases of a test with each of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.reference import ReferenceOps

# The ops that this machine can run: always the reference, and the C++ ops where they are built.
OPS = {"reference": ReferenceOps}
if (best := get_ops("float32")).name != "reference":
    OPS[best.name] = get_ops
# The reference is slow, and computes all models in the tests of parity. In others it takes these, unless it is alone.
BY_REFERENCE = ("qwen3", "qwen2_bf16")


def with_ops(names: Iterable[str]) -> list:
    """Return the parameters ``make_runner``, which is indirect, and ``name`` of a test of each checkpoint with each of
    the ops. Those of the reference with a checkpoint that is not in BY_REFERENCE are slow."""
    return [
        pytest.param(ops, name, marks=[pytest.mark.slow] if is_slow(ops, name) else [], id=f"{ops}-{name}")
        for name in names
        for ops in sorted(OPS)
    ]


def is_slow(ops: str, name: str) -> bool:
    return ops == "reference" and len(OPS) > 1 and name not in BY_REFERENCE
