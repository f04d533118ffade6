"""Linears of the reference ops, with their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import paddle

from fastdeploy.model_executor.ops.interface import AdapterRows, PackedLinear, PackedLora

ROWS = 16  # of a tile
COLUMNS = (
    16  # rows of a tile begin at multiples of 64 bytes: on some CPUs MKL adds in another order for other addresses
)


@dataclass  # not frozen: a protocol with plain attributes has no read-only implementer
class ReferenceLinear:
    """``weight`` is float32 [out_features, in_features]."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None
    out_features: int
    in_features: int
    nbytes: int


class ReferencePart(NamedTuple):
    """The adapter of the projection that begins at output ``first``: a [r, in_features], b [n, r]."""

    first: int
    a: paddle.Tensor
    b: paddle.Tensor
    scaling: float


@dataclass
class ReferenceLora:
    """``parts``: those projections of a linear that have an adapter."""

    parts: list[ReferencePart]
    out_features: int
    in_features: int
    rank: int
    nbytes: int


# The adapters of one linear in a batch: the rows (int64) that use an adapter, and the adapter.
LoraRows: TypeAlias = "list[tuple[np.ndarray, PackedLora]]"


def lora_rows(adapters: AdapterRows | None, loras: Sequence[PackedLora | None]) -> LoraRows:
    """Return the adapters of one linear, each with its rows. loras: one entry for each of ``adapters``."""
    if adapters is None:
        return []
    found = [(np.flatnonzero(adapters.rows == i), lora) for i, lora in enumerate(loras)]
    return [(rows, lora) for rows, lora in found if lora is not None and len(rows)]


def linear_in_tiles(x: paddle.Tensor, weight: PackedLinear, loras: LoraRows) -> paddle.Tensor:
    """Return x @ W.T + bias + adapters with padding: x [M, K] -> [M rounded up to ROWS, N]. Callers cut the padding off
    last: an approximation such as exp gives other bits in the vectorised part of an array than at its end, and an array
    of whole tiles is vectorised to the end."""
    assert isinstance(weight, ReferenceLinear)
    y = _product_in_tiles(x, weight.weight)
    if weight.bias is not None:
        y = y + weight.bias
    for rows, lora in loras:
        assert isinstance(lora, ReferenceLora)
        assert (lora.in_features, lora.out_features) == (weight.in_features, weight.out_features)
        mine, total = paddle.index_select(x, paddle.to_tensor(rows)), np.array(y.numpy())
        for part in lora.parts:
            delta = _product_in_tiles(_product_in_tiles(mine, part.a), part.b)[: len(rows)] * part.scaling
            total[rows, part.first : part.first + part.b.shape[0]] += delta.numpy()
        y = paddle.to_tensor(total)
    return y


def _product_in_tiles(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """Return x @ W.T with padding: x [M, K] -> [M rounded up to ROWS, N]."""
    rows, columns = x.shape
    if rows % ROWS or columns % COLUMNS:
        x = paddle.nn.functional.pad(x, [0, -rows % ROWS, 0, -columns % COLUMNS])
    if columns % COLUMNS:
        weight = paddle.nn.functional.pad(weight, [0, 0, 0, -columns % COLUMNS])
    tiles = [paddle.matmul(x[row : row + ROWS], weight, transpose_y=True) for row in range(0, x.shape[0], ROWS)]
    return tiles[0] if len(tiles) == 1 else paddle.concat(tiles)
