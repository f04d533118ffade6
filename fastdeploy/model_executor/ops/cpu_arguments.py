"""Values of ``interface`` as arguments of the C++ ops. They are checked here: the kernels write to the addresses that
follow from them, without checks of their own."""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping, Sequence
from ctypes import c_void_p
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import paddle

from fastdeploy.core.fingerprint import ZERO, Fingerprint
from fastdeploy.model_executor.ops.blocks import (
    BLOCKS,
    AttentionSpec,
    Block,
    DecoderLayer,
    ExpertsBlock,
    RouterSpec,
)
from fastdeploy.model_executor.ops.cpu_library import (
    BLOCK_ARGS,
    AttentionSpecArgs,
    Batch,
    BlockArgs,
    CpuKVCache,
    CpuLinear,
    DeltaItemArgs,
    LogprobArgs,
    RegionArgs,
    RouterSpecArgs,
    StageItemArgs,
    StageResultArgs,
    address,
    lora_handle,
)
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    DeltaItem,
    KVCache,
    PackedAdapter,
    Problem,
    Region,
    Routing,
    StageItem,
    StageResult,
)
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks

Handles: TypeAlias = "ctypes.Array[c_void_p]"
_FLOAT32 = (paddle.float32,)  # `x in` compares identity first; `==` between dtypes costs five times as much
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


class Limits(NamedTuple):
    """The limits of a batch: block ids are below num_blocks, positions below max_len (the length of the rope
    tables)."""

    num_blocks: int
    block_size: int
    max_len: int


class RoutingLimits(NamedTuple):
    """The sizes of a ``Routing``: layers with experts, and experts of a row; and the ``experts`` of each layer."""

    layers: int
    top_k: int
    experts: int


def data(tensor: paddle.Tensor) -> int:
    """Return the address of a contiguous float32 tensor. A view such as a transpose is refused."""
    assert tensor.dtype in _FLOAT32 and tensor.is_contiguous()
    return tensor.data_ptr()


def _field(value: Any) -> Any:
    """Return a field of a class of ``interface`` as the field of its C structure."""
    match value:
        case CpuLinear():
            return value.handle
        case paddle.Tensor():
            return data(value)
        case np.ndarray():
            return address(value)
        case AttentionSpec():
            return spec_args(value)
        case RouterSpec():
            return RouterSpecArgs(*map(_field, value))
    return value


def spec_args(spec: AttentionSpec) -> Any:
    """Return the arguments of the attention of one layer."""
    return AttentionSpecArgs(*map(_field, spec))


def block_args(block: Block, ends_layer: bool) -> tuple[BlockArgs, Any]:
    """Return the arguments of a block, and what they refer to. ends_layer: it is the last block of its layer."""
    fields = BLOCK_ARGS[type(block)](*map(_field, vars(block).values()))
    kind = BLOCKS.index(type(block))
    return BlockArgs(kind, len(block.linears), ends_layer, ctypes.addressof(fields)), fields


def limits_of(cache: KVCache, spec: AttentionSpec) -> Limits:
    """Return the limits of batches for an attention over this cache. Checks that the two belong together."""
    assert isinstance(cache, CpuKVCache)
    assert spec.head_dim == cache.head_dim and spec.num_kv_heads == cache.num_kv_heads
    assert 0 <= spec.layer < cache.layers and spec.num_heads % spec.num_kv_heads == 0
    assert spec.rope_cos.shape == spec.rope_sin.shape and spec.rope_cos.shape[1] == spec.rotated // 2
    assert 0 < spec.rotated <= spec.head_dim and spec.rotated % 2 == 0
    return Limits(cache.num_blocks, cache.block_size, spec.rope_cos.shape[0])


def batch_args(batch: AttentionBatch, limits: Limits, tokens: int) -> Batch:
    """Return the arguments of a batch; they are valid while ``batch`` lives."""
    _check_batch(batch, limits)
    assert tokens == len(batch.positions)
    sequences, width = batch.block_tables.shape
    addresses = [address(field) for field in (batch.cu_tokens, batch.starts, batch.block_tables, batch.positions)]
    return Batch(tokens, sequences, width, *addresses)


def _check_batch(batch: AttentionBatch, limits: Limits) -> None:
    """Check a batch: the kernels write to the addresses that follow from it, without checks of their own."""
    assert all(field.dtype == np.int32 and field.flags.c_contiguous for field in batch)
    sequences, width = batch.block_tables.shape
    assert len(batch.cu_tokens) == len(batch.starts) + 1 == sequences + 1
    assert batch.cu_tokens[0] == 0 and batch.cu_tokens[-1] == len(batch.positions) > 0
    counts = np.diff(batch.cu_tokens)
    end = min(limits.max_len, width * limits.block_size)
    assert counts.min() >= 0 and batch.starts.min() >= 0 and (batch.starts + counts).max() <= end
    assert batch.positions.min() >= 0 and batch.positions.max() < end
    assert batch.block_tables.min() >= 0 and batch.block_tables.max() < limits.num_blocks


def adapter_rows(adapters: AdapterRows, tokens: int) -> int:
    """Return the address of the adapter of each of ``tokens`` rows; it is valid while ``adapters`` lives."""
    rows = adapters.rows
    assert rows.dtype == np.int32 and rows.flags.c_contiguous and rows.shape == (tokens,)
    assert tokens == 0 or (rows.min() >= -1 and rows.max() < len(adapters.adapters))
    return address(rows)


def routing_limits(blocks: Sequence[Block]) -> RoutingLimits | None:
    """Return the limits of the routing of steps through these blocks; None without experts."""
    found = [block for block in blocks if isinstance(block, ExpertsBlock)]
    if not found:
        return None
    assert [block.routing.place for block in found] == list(range(len(found)))
    [sizes] = {(block.routing.top_k, block.experts) for block in found}
    return RoutingLimits(len(found), *sizes)


def routing_rows(routing: Routing, limits: RoutingLimits, tokens: int) -> int:
    """Return the address of the experts of ``tokens`` rows; it is valid while ``routing`` lives."""
    experts = routing.experts
    assert experts.dtype == np.uint16 and experts.flags.c_contiguous
    assert experts.shape == (tokens, limits.layers, limits.top_k)
    assert not routing.forced or (experts < limits.experts).all()
    return address(experts)


def pointers(addresses: Sequence[int | None]) -> Handles:
    """Return an array of addresses for C++."""
    return (c_void_p * len(addresses))(*addresses)


def adapter_handles(
    known: MutableMapping[PackedAdapter, Handles], adapter: PackedAdapter, layers: Sequence[DecoderLayer]
) -> Handles:
    """Return the handles of the linears of an adapter over ``layers``. Keeps them in ``known``."""
    found = known.get(adapter)
    if found is None:
        handles: list[int | None] = []
        for layer, of_blocks in zip(layers, adapter.layers, strict=True):
            for block, adapted in zip(layer.blocks, of_blocks, strict=True):
                handles += map(lora_handle, adapted, block.linears)
        found = known[adapter] = pointers(handles)
    return found


def stage_item(item: StageItem) -> StageItemArgs:
    """Return the arguments of one item of ``Ops.stage``."""
    region, kind = _region(item.region), KINDS.index(item.dtype)
    assert item.offset >= 0
    view = (0, 0, 0)
    if item.view is not None:
        view = item.view
        assert item.region.linear is not None and item.region.rows % item.view.run == 0 and min(view[:2]) > 0
        assert not item.region.experts
    elif item.region.experts:
        of_expert = item.region.rows // item.region.experts
        view = (of_expert, of_expert, of_expert * item.region.columns)
    if item.memory is None:
        return StageItemArgs(region, kind, item.offset, item.fd, None, 0, *view)
    _check_bytes(item.memory)
    return StageItemArgs(region, kind, item.offset, -1, address(item.memory), item.memory.size, *view)


def delta_item(item: DeltaItem) -> DeltaItemArgs:
    """Return the arguments of one item of ``Ops.apply_deltas``."""
    assert item.region.linear is not None or item.region.vector is not None
    _check_bytes(item.payload)
    return DeltaItemArgs(_region(item.region), address(item.payload), item.payload.size)


def _region(region: Region) -> Any:
    linear, vector = region.linear, region.vector
    assert region.rows >= 0 and region.columns >= 0 and (linear is None or vector is None)
    if linear is not None:
        assert region.columns == linear.in_features and isinstance(linear, CpuLinear)
        assert 0 <= region.first_row <= region.first_row + region.rows <= linear.out_features
    if region.experts:
        of_expert, rest = divmod(region.rows, region.experts)
        assert linear is not None and rest == 0 and of_expert % (32 if region.interleaved else 16) == 0
    if vector is not None:
        assert vector.dtype == np.float32 and vector.flags.c_contiguous and vector.flags.writeable
        assert vector.size == region.rows * region.columns
    return RegionArgs(*map(_field, region))


def _check_bytes(array: np.ndarray) -> None:
    assert array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous


def stop_flag(stop: np.ndarray) -> int:
    """Return the address of the flag that ends a staging."""
    assert stop.dtype == np.int32 and stop.shape == (1,)
    return address(stop)


def stage_result(result: StageResultArgs) -> StageResult:
    """Return the result of one item."""
    problem = PROBLEMS[result.problem]
    if problem is not None:
        return StageResult(ZERO, problem, result.error)
    return StageResult(Fingerprint(result.first, result.second))


def sample_arrays(
    batch: SampleBatch, cutoff: Cutoff | None, masks: TokenMasks | None, rows: int, vocab: int
) -> list[np.ndarray | None]:
    """Return the five arrays of ``batch`` as fd_sample takes them, and the address of each row's mask, if any."""
    kinds = (np.float32, np.int32, np.float32, np.float32, np.float64)
    arrays = [np.ascontiguousarray(field, kind) for field, kind in zip(batch, kinds, strict=True)]
    assert all(array.shape == (rows,) for array in arrays)
    assert cutoff is None or _is_cutoff(cutoff, rows)
    if masks is None:
        return [*arrays, None]
    bits = masks.bits
    assert bits.dtype == np.uint32 and bits.flags.c_contiguous and bits.shape[1] * 32 >= vocab
    addresses = np.zeros(rows, np.uintp)
    addresses[masks.rows] = bits.ctypes.data + np.arange(len(bits)) * bits.strides[0]
    return [*arrays, addresses]


def logprob_args(batch: LogprobBatch, rows: int, vocab: int) -> tuple[LogprobArgs, TokenLogprobs]:
    """Return the arguments of fd_logprobs, and the arrays that it fills."""
    ids, top = _token_ids(batch.token_ids, vocab), batch.top
    assert ids.shape == (rows,) and 0 <= top <= vocab
    temperature = None if batch.temperature is None else np.ascontiguousarray(batch.temperature, np.float32)
    assert temperature is None or (temperature.shape == (rows,) and (temperature > 0).all())
    cutoff = None if batch.cutoff is None else Cutoff(*map(np.ascontiguousarray, batch.cutoff))
    assert cutoff is None or _is_cutoff(cutoff, rows)
    others, ends = np.empty(0, np.int32), None
    if batch.other_ids is not None and batch.other_ends is not None:
        others, ends = _token_ids(batch.other_ids, vocab), np.ascontiguousarray(batch.other_ends, np.int64)
        assert ends.shape == (rows,) and (np.diff(ends, prepend=0) >= 0).all() and (not rows or ends[-1] == len(others))
    shapes = ((rows,), (rows, top), (rows, top), (rows,), others.shape)
    kinds = (np.float32, np.float32, np.int32, np.int32, np.float32)
    found = TokenLogprobs(*(np.empty(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)))
    inputs = [ids, temperature, *(cutoff or (None, None)), others, ends]
    outputs = [found.chosen, found.ranks, found.top_values, found.top_ids, found.others]
    args = LogprobArgs(*map(_address_or_null, inputs), top, *map(address, outputs))
    args.arrays = inputs  # the structure has their addresses alone
    return args, found


def _token_ids(ids: np.ndarray, vocab: int) -> np.ndarray:
    ids = np.ascontiguousarray(ids, np.int32)
    assert not ids.size or 0 <= ids.min() <= ids.max() < vocab
    return ids


def _is_cutoff(cutoff: Cutoff, rows: int) -> bool:
    kinds = (cutoff.logits.dtype, cutoff.ids.dtype) == (np.float32, np.int32)
    shapes = cutoff.logits.shape == cutoff.ids.shape == (rows,)
    return kinds and shapes and all(array.flags.c_contiguous for array in cutoff)


def _address_or_null(array: np.ndarray | None) -> int | None:
    return None if array is None else address(array)
