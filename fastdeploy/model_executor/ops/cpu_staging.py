"""Staging and deltas through the C++ ops. See ``Ops.stage`` and ``Ops.apply_deltas``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from fastdeploy.core.fingerprint import ZERO, Fingerprint
from fastdeploy.model_executor.ops.cpu_library import DeltaItemArgs, RegionArgs, StageItemArgs, StageResultArgs
from fastdeploy.model_executor.ops.cpu_memory import address, handle_of
from fastdeploy.model_executor.ops.interface import DeltaItem, Problem, Region, StageItem, StageResult

# The order of the enums of staging.h.
PROBLEMS = (
    None,
    Problem.TOO_LARGE,
    Problem.NOT_FINITE,
    Problem.CUT_SHORT,
    Problem.READ_ERROR,
    Problem.MALFORMED,
    Problem.STOPPED,
)
KINDS = ("F32", "BF16", "F16")


def stage(
    library: ctypes.CDLL, bf16: bool, items: Sequence[StageItem], stop: np.ndarray, check: Callable[[int], None]
) -> list[StageResult]:
    """Call ``fd_stage``. check: raises the error of a status."""
    args = (StageItemArgs * len(items))(*map(_stage_item, items))
    results = (StageResultArgs * len(items))()
    check(library.fd_stage(bf16, args, len(items), _stop(stop), results))
    return [_result(result) for result in results]


def apply_deltas(
    library: ctypes.CDLL, bf16: bool, items: Sequence[DeltaItem], stop: np.ndarray, check: Callable[[int], None]
) -> list[StageResult]:
    """Call ``fd_apply_deltas``. check: raises the error of a status."""
    args = (DeltaItemArgs * len(items))(*map(_delta_item, items))
    results = (StageResultArgs * len(items))()
    check(library.fd_apply_deltas(bf16, args, len(items), _stop(stop), results))
    return [_result(result) for result in results]


def _stage_item(item: StageItem) -> StageItemArgs:
    region, kind = _region(item.region), KINDS.index(item.dtype)
    assert item.offset >= 0
    if item.memory is None:
        return StageItemArgs(region, kind, item.offset, item.fd, None, 0)
    _check_bytes(item.memory)
    return StageItemArgs(region, kind, item.offset, -1, address(item.memory), item.memory.size)


def _delta_item(item: DeltaItem) -> DeltaItemArgs:
    assert item.region.linear is not None or item.region.vector is not None
    _check_bytes(item.payload)
    return DeltaItemArgs(_region(item.region), address(item.payload), item.payload.size)


def _region(region: Region) -> RegionArgs:
    linear, vector = region.linear, region.vector
    assert region.rows >= 0 and region.columns >= 0 and (linear is None or vector is None)
    if linear is not None:
        assert region.columns == linear.in_features
        assert 0 <= region.first_row <= region.first_row + region.rows <= linear.out_features
        return RegionArgs(region.rows, region.columns, handle_of(linear), region.first_row, None)
    if vector is not None:
        assert vector.dtype == np.float32 and vector.flags.c_contiguous and vector.flags.writeable
        assert vector.size == region.rows * region.columns
        return RegionArgs(region.rows, region.columns, None, 0, address(vector))
    return RegionArgs(region.rows, region.columns, None, 0, None)


def _check_bytes(array: np.ndarray) -> None:
    assert array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous


def _stop(stop: np.ndarray) -> int:
    assert stop.dtype == np.int32 and stop.shape == (1,)
    return address(stop)


def _result(result: StageResultArgs) -> StageResult:
    problem = PROBLEMS[result.problem]
    if problem is not None:
        return StageResult(ZERO, problem, result.error)
    return StageResult(Fingerprint(result.first, result.second))
