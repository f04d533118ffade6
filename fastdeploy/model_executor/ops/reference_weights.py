"""Packed weights and adapters of the reference ops, and the staging of new weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle

from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import ZERO, change, fingerprint
from fastdeploy.model_executor.ops.interface import (
    INT8_GROUP,
    DeltaItem,
    Ops,
    Problem,
    Region,
    StageItem,
    StageResult,
    View,
)

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass  # not frozen: a protocol with plain attributes has no read-only implementer
class ReferenceLinear:
    """A packed linear of the reference ops. ``weight`` is float32 [out_features, in_features]. int8: the values of
    ``Ops.quantize``, each times its scale, likewise."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None
    out_features: int
    in_features: int
    nbytes: int
    int8: paddle.Tensor | None = None
    quantized: bool = False

    def transposed_heads(self, heads: int, rows: int) -> ReferenceLinear:
        """See ``PackedLinear.transposed_heads``."""
        of_heads = self.weight.reshape([heads, -1, self.in_features])[:, :rows].transpose([0, 2, 1])
        weight = of_heads.reshape([heads * self.in_features, rows])
        return ReferenceLinear(weight, None, heads * self.in_features, rows, 4 * weight.size)


class ReferencePart(NamedTuple):
    """The adapter of the projection that begins at output ``first``: a [r, in_features], b [n, r]."""

    first: int
    a: paddle.Tensor
    b: paddle.Tensor
    scaling: float


@dataclass
class ReferenceLora:
    """The packed adapter of one linear. ``parts``: those projections of the linear that have an adapter."""

    parts: list[ReferencePart]
    out_features: int
    in_features: int
    rank: int
    nbytes: int


def quantized(rows: np.ndarray, largest: int) -> np.ndarray:
    """Round each INT8_GROUP values of a row, float32 [N, K], to an integer from -largest to largest, times the scale of
    the group. A group with a value that is not finite becomes NaN; one without a magnitude of 2^-100 becomes 0."""
    n, k = rows.shape
    groups = np.pad(rows, [(0, 0), (0, -k % INT8_GROUP)]).reshape(n, -1, INT8_GROUP)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        peak = np.abs(groups).max(-1, keepdims=True)
        integers = np.rint(groups * (np.float32(largest) / peak))
        values = np.where(peak < np.float32(2**-100), np.float32(0), integers * (peak / np.float32(largest)))
    values = np.where(np.isfinite(peak), values, np.float32(np.nan))
    return np.ascontiguousarray(values.reshape(n, -1)[:, :k])


def to_float32(array: np.ndarray) -> np.ndarray:
    """Convert float32, float16, or bfloat16 given as uint16 bits to float32."""
    if array.dtype == np.uint16:
        widened: np.ndarray = array.astype(np.uint32) << 16
        return widened.view(np.float32)
    return np.ascontiguousarray(array, dtype=np.float32)


def stage(items: Sequence[StageItem], stop: np.ndarray, dtype: str) -> list[StageResult]:
    """See ``Ops.stage``."""
    return [_stage(item, dtype) if not stop[0] else StageResult(ZERO, Problem.STOPPED) for item in items]


def apply_deltas(ops: Ops, items: Sequence[DeltaItem], stop: np.ndarray, dtype: str) -> list[StageResult]:
    """See ``Ops.apply_deltas``."""
    return [_apply(ops, item, dtype) if not stop[0] else StageResult(ZERO, Problem.STOPPED) for item in items]


def _stage(item: StageItem, dtype: str) -> StageResult:
    region, kind = item.region, DTYPES[item.dtype]
    nbytes = region.rows * region.columns * kind.itemsize
    if item.view is not None:
        nbytes = (_index_in(item.view, region)[-1, -1] + 1) * kind.itemsize
    if item.memory is not None:
        raw = item.memory[item.offset : item.offset + nbytes].tobytes()
    else:
        try:
            raw = os.pread(item.fd, nbytes, item.offset)
        except OSError as error:
            return StageResult(ZERO, Problem.READ_ERROR, error.errno or 0)
    if len(raw) < nbytes:
        return StageResult(ZERO, Problem.CUT_SHORT)
    source = np.frombuffer(raw, kind)
    if item.view is not None:
        source = source[_index_in(item.view, region)].reshape(-1)
    values = _in_dtype(source, dtype)
    if not _finite(values):
        return StageResult(ZERO, Problem.TOO_LARGE if _finite(source) else Problem.NOT_FINITE)
    _write(region, values)
    return StageResult(fingerprint(values))


def _index_in(view: View, region: Region) -> np.ndarray:
    """Return the index in the source of each value of a region."""
    rows, columns = np.arange(region.rows)[:, None], np.arange(region.columns)
    return columns * view.stride + rows // view.run * view.step + rows % view.run


def _apply(ops: Ops, item: DeltaItem, dtype: str) -> StageResult:
    region = item.region
    old = _read(ops, region, dtype)
    try:
        index, values = delta_format.read_overwrite(item.payload, old.size, old.itemsize)
    except ValueError:
        return StageResult(ZERO, Problem.MALFORMED)
    values = values.view(old.dtype)
    if not _finite(values):
        return StageResult(ZERO, Problem.NOT_FINITE)
    new = old.copy()
    new[index] = values
    _write(region, new)
    return StageResult(change(index, old[index], values))


def _read(ops: Ops, region: Region, dtype: str) -> np.ndarray:
    """Return the values of a region, flat, in this dtype: that of the ops for a linear."""
    if region.vector is not None:
        return _in_dtype(region.vector.copy(), dtype)
    assert region.linear is not None
    rows = ops.unpack_linear(region.linear, region.first_row, region.first_row + region.rows)
    if region.experts:  # [experts, gate or up, row of it, column]
        rows = rows.reshape(region.experts, 1 + region.interleaved, -1, region.columns).transpose(0, 3, 2, 1)
    return rows.reshape(-1)


def _write(region: Region, values: np.ndarray) -> None:
    if region.vector is not None:
        region.vector[:] = to_float32(values)
    elif region.linear is not None:
        assert isinstance(region.linear, ReferenceLinear)
        rows = to_float32(values)
        if region.experts:
            rows = rows.reshape(region.experts, region.columns, -1, 1 + region.interleaved).transpose(0, 3, 2, 1)
        rows = rows.reshape(region.rows, region.columns)
        region.linear.weight[region.first_row : region.first_row + region.rows] = paddle.to_tensor(rows)


def _in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round values to nearest even. bfloat16 is uint16 bits, before and after."""
    if values.dtype == np.uint16 and dtype == "bfloat16":
        return values
    wide = to_float32(values)
    if dtype == "float32":
        return wide
    bits = wide.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(to_float32(values)).all())
