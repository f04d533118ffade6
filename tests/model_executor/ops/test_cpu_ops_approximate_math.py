"""Errors of the approximations in kernels with bfloat16 input. The tolerance of other tests, 2^-9, would hide them."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.cpu_library import load_library

pytestmark = pytest.mark.skipif(
    CpuOps("float32").isa not in ("avx512_bf16", "amx"), reason="only kernels with bfloat16 input approximate"
)


def computed(name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    getattr(load_library(), f"fd_probe_{name}")(x.ctypes.data, len(x), out.ctypes.data)
    return out.astype(np.float64)


def test_exp2_is_within_3e_6_on_its_whole_range_and_1_at_0():
    reduced = np.linspace(-0.5, 0.5, 1 << 18, dtype=np.float32)
    for x in (reduced, np.linspace(-126, 127, 1 << 18, dtype=np.float32)):
        assert np.abs(computed("exp2", x) / np.exp2(x.astype(np.float64)) - 1).max() < 3e-6
    assert computed("exp2", np.zeros(1, np.float32)) == 1
    assert (computed("exp2", np.arange(-126, 128, dtype=np.float32)) == np.exp2(np.arange(-126, 128.0))).all()
    assert np.isnan(computed("exp2", np.full(1, np.nan, np.float32)))


def test_silu_is_within_1e_5():
    x = np.linspace(-80, 80, 1 << 18, dtype=np.float32)
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    nonzero = x != 0
    assert np.abs(computed("silu", x)[nonzero] / exact[nonzero] - 1).max() < 1e-5
    assert computed("silu", np.array([0, 1e30, -1e30], np.float32)).tolist()[0] == 0
