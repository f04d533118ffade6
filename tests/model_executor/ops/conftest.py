"""The C++ ops at every instruction set of this machine, beside the reference."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.cpu_library import ISA_NAMES, LIBRARY, load_library
from fastdeploy.model_executor.ops.reference import ReferenceOps

# On a machine that cannot build the library there is nothing to compare. Where there is a compiler, a library that is
# missing is a failure of these tests.
HAVE_OPS = LIBRARY.exists() or any(map(shutil.which, ("g++", "clang++", "c++")))
if not HAVE_OPS:
    collect_ignore_glob = ["test_cpu_ops_*.py"]


def available_isas() -> list[str]:
    """Return the instruction sets from avx2 to the best of this CPU."""
    if not HAVE_OPS:
        return []
    library = load_library()
    before = library.fd_isa()
    best = library.fd_set_isa(len(ISA_NAMES) - 1)
    library.fd_set_isa(before)
    return list(ISA_NAMES[1 : best + 1])


ISAS = available_isas()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark cases slow whose kernels another case has, too. float32, and ops with the mark ``by_width``, have kernels
    for two widths of vectors: the first instruction set chooses one and the last the other."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    by_width = item.get_closest_marker("by_width") or params.get("dtype") == "float32"
    if by_width and params.get("isa") in ISAS[1:-1]:
        item.add_marker("slow")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ops = CpuOps("float32")
    before = ops.isa
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


class Int8CpuOps(CpuOps):
    """Ops whose packed weights all have int8 values."""

    def pack_linear(self, parts, bias=None):
        return quantized(self, super().pack_linear(parts, bias))


class Int8ReferenceOps(ReferenceOps):
    """Ops whose packed weights all have int8 values."""

    def pack_linear(self, parts, bias=None):
        return quantized(self, super().pack_linear(parts, bias))


def quantized(ops, weight):
    ops.quantize([weight], np.zeros(1, np.int32))
    return weight


@pytest.fixture
def ops(isa: str, dtype: str) -> CpuOps:
    ops = Int8CpuOps("bfloat16") if dtype == "int8" else CpuOps(dtype)
    assert ops.isa == isa
    return ops


@pytest.fixture
def reference(dtype: str) -> ReferenceOps:
    return Int8ReferenceOps("bfloat16") if dtype == "int8" else ReferenceOps(dtype)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261120)


@pytest.fixture
def threads(ops: CpuOps) -> Iterator[None]:
    """Begin with two threads, also on one core, and restore their number after the test."""
    ops.set_num_threads(2)
    yield
    ops.set_num_threads(0)
