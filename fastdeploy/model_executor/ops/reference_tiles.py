"""Products and attention of the reference ops, in tiles of one shape for every batch (see reference.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, AttentionSpec, PackedLinear
from fastdeploy.model_executor.ops.interface import AdapterRows, AttentionBatch, PackedLora
from fastdeploy.model_executor.ops.reference_weights import ReferenceLinear, ReferenceLora, quantized

ROWS = 16  # of a tile
KEYS = 64  # of a tile
LARGEST_INPUT = 127 * 256  # of the integers to which the input of an int8 linear is rounded
# Rows of a tile begin at multiples of 64 bytes: on some CPUs MKL adds in another order for other addresses.
COLUMNS = 16


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
    if weight.int8 is not None:
        x = paddle.to_tensor(quantized(x.numpy(), LARGEST_INPUT))
    y = _product_in_tiles(x, weight.weight if weight.int8 is None else weight.int8)
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


def head_products(x: paddle.Tensor, weight: PackedLinear, first: int, rows: int) -> paddle.Tensor:
    """Return x @ W_h.T of each head h: x [M, heads, K] -> [M, heads, rows]. The weight has as many rows for each head;
    W_h are ``rows`` of these, from the first-th on."""
    assert isinstance(weight, ReferenceLinear)
    count, heads, _ = x.shape
    of_heads = weight.weight.reshape([heads, -1, weight.in_features])[:, first : first + rows]
    found = [_product_in_tiles(x[:, head].contiguous(), of_heads[head])[:count] for head in range(heads)]
    return paddle.stack(found, axis=1)


def gated(gate: paddle.Tensor, up: paddle.Tensor, activation: Activation) -> paddle.Tensor:
    """Return the activation of gate and up, both of one shape."""
    if activation is Activation.SWIGLU_CLAMPED:
        gate, up = gate.clip(max=SWIGLU_LIMIT), up.clip(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * paddle.nn.functional.sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)
    if activation is Activation.GELU_TANH:
        return paddle.nn.functional.gelu(gate, approximate=True) * up
    return paddle.nn.functional.silu(gate) * up


def rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor, interleaved: bool = False) -> paddle.Tensor:
    """Apply the rotary embedding: x [T, heads, dim], cos and sin [T, 1, rotated / 2]. Dimension i is rotated with
    dimension i + rotated / 2. interleaved: dimension 2i is rotated with dimension 2i + 1. Dimensions from ``rotated``
    on stay as they are."""
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return paddle.concat([rotate(x[:, :, :rotated], cos, sin, interleaved), x[:, :, rotated:]], axis=-1)
    if interleaved:
        even, odd = x[:, :, ::2], x[:, :, 1::2]
        return paddle.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)
    low, high = paddle.split(x, 2, axis=-1)
    return paddle.concat([low * cos - high * sin, high * cos + low * sin], axis=-1)


def slots_of(block_tables: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return the slot of each position [N, P] in the block tables [N, W]. Positions behind a table count as positions
    in its last block."""
    blocks = np.minimum(positions // block_size, block_tables.shape[1] - 1)
    return np.take_along_axis(block_tables, blocks, axis=1) * block_size + positions % block_size


def contained(k: paddle.Tensor, v: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return keys and values [T, kv_heads, dim], with key NaN and value 0 where either is not finite. So the score is
    NaN for every row that sees the pair, and the rows before it, whose weight for it is 0, add 0 x 0."""
    finite = (paddle.isfinite(k) & paddle.isfinite(v)).all(axis=-1, keepdim=True)
    return paddle.where(finite, k, paddle.full([1], np.nan)), paddle.where(finite, v, paddle.zeros([1]))


def attend(
    q: paddle.Tensor,
    keys: paddle.Tensor,
    values: paddle.Tensor,
    batch: AttentionBatch,
    block_size: int,
    spec: AttentionSpec,
) -> paddle.Tensor:
    """Causal attention with a running softmax over tiles of KEYS keys, which begin at multiples of KEYS. The first tile
    is the first one of which one of the ROWS rows sees a key.

    A tile of which a row sees no key leaves the sums of the row as they are, bit for bit (weights are exactly 0, the
    rescaling factor is exactly 1). So the other rows of the batch and of the chunk do not matter.
    """
    tokens, groups, dim = q.shape[0], spec.num_heads // spec.num_kv_heads, spec.head_dim
    row_of_tile, sequence_of_tile = [], []
    for sequence in range(len(batch.starts)):
        for row in range(int(batch.cu_tokens[sequence]), int(batch.cu_tokens[sequence + 1]), ROWS):
            row_of_tile.append(row)
            sequence_of_tile.append(sequence)
    ends = batch.cu_tokens[np.array(sequence_of_tile) + 1]
    # A tile is filled up by repeating the last row of its sequence.
    rows = np.minimum(np.array(row_of_tile)[:, None] + np.arange(ROWS), ends[:, None] - 1)
    positions, tables = batch.positions[rows], batch.block_tables[sequence_of_tile]
    tiles = len(rows)
    # [tiles, kv_heads, groups * ROWS, dim]
    query = paddle.index_select(q * spec.scale, paddle.to_tensor(rows.reshape(-1)))
    query = query.reshape([tiles, ROWS, spec.num_kv_heads, groups, dim]).transpose([0, 2, 3, 1, 4])
    query = query.reshape([tiles, spec.num_kv_heads, groups * ROWS, dim])
    shape = [tiles, spec.num_kv_heads, groups * ROWS, 1]
    peak, mass = paddle.full(shape, -1e30), paddle.zeros(shape)
    total = paddle.zeros([tiles, spec.num_kv_heads, groups * ROWS, dim])
    never, nothing = paddle.full([1], -np.inf), paddle.zeros([1])
    begins = positions - spec.window + 1 if spec.window else np.zeros_like(positions)  # the first key that a row sees
    firsts = np.maximum(begins[:, :1], 0) // KEYS * KEYS
    for first in range(0, int((positions[:, -1:] - firsts).max()) + 1, KEYS):
        key_positions = firsts + np.arange(first, first + KEYS)
        slots = paddle.to_tensor(slots_of(tables, key_positions, block_size).reshape(-1))
        tile_shape = [tiles, KEYS, spec.num_kv_heads, dim]
        k = paddle.index_select(keys, slots).reshape(tile_shape).transpose([0, 2, 1, 3])
        v = paddle.index_select(values, slots).reshape(tile_shape).transpose([0, 2, 1, 3])
        # Slots behind the last row may hold values of an earlier request: 0 * NaN must not reach the sums.
        written = paddle.to_tensor(key_positions <= positions[:, -1:]).reshape([tiles, 1, KEYS, 1])
        v = paddle.where(written & ~paddle.isnan(v), v, nothing)  # NaN: of a key that is the value, too
        seen = (key_positions[:, None, :] <= positions[:, :, None]) & (key_positions[:, None, :] >= begins[:, :, None])
        mask = paddle.to_tensor(np.tile(seen, (1, groups, 1))).unsqueeze(1)
        scores = paddle.where(mask, paddle.matmul(query, k, transpose_y=True), never)
        new_peak = paddle.maximum(peak, scores.max(-1, keepdim=True))
        weights, rescale = paddle.exp(scores - new_peak), paddle.exp(peak - new_peak)
        mass = mass * rescale + weights.sum(-1, keepdim=True)
        total = total * rescale + paddle.matmul(weights, v)
        peak = new_peak
    if spec.sinks is not None:
        sinks = spec.sinks.reshape([1, spec.num_kv_heads, groups, 1]).tile([1, 1, 1, ROWS]).reshape([1, *shape[1:]])
        mass = mass + paddle.exp(sinks - peak)
    out = (total / mass).reshape([tiles, spec.num_kv_heads, groups, ROWS, dim]).transpose([0, 3, 1, 2, 4])
    where = np.empty(tokens, np.int64)
    where[rows.reshape(-1)[::-1]] = np.arange(tiles * ROWS)[::-1]
    return paddle.index_select(out.reshape([tiles * ROWS, spec.num_heads * dim]), paddle.to_tensor(where))
