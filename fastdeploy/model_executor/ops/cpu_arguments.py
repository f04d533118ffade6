"""Arguments of the C++ ops as ctypes structures. Shapes are checked here: the kernels write to the addresses that
follow from them, without checks of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.model_executor.ops.cpu_library import AttentionArgs, AttentionBlockArgs, Batch, BlockArgs, MlpBlockArgs
from fastdeploy.model_executor.ops.cpu_memory import CpuKVCache, address, handle_of
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    AttentionBlock,
    AttentionSpec,
    Block,
    KVCache,
    PackedLinear,
)

_FLOAT32 = (paddle.float32,)  # `x in` compares identity first; `==` between dtypes costs five times as much


class Limits(NamedTuple):
    """Limits of a batch: block ids are below num_blocks, positions below max_len (the length of the rope tables)."""

    num_blocks: int
    block_size: int
    max_len: int


def data(tensor: paddle.Tensor) -> int:
    """Return the address of a contiguous float32 tensor. A view such as a transpose is refused."""
    assert tensor.dtype in _FLOAT32 and tensor.is_contiguous()
    return tensor.data_ptr()


def block_args(block: Block, ends_layer: bool, cache: KVCache) -> BlockArgs:
    """Return the arguments of a block, without those of the batch."""
    [hidden] = block.norm.shape
    if isinstance(block, AttentionBlock):
        spec = block.attention
        heads = spec.num_heads * spec.head_dim
        width = heads + 2 * spec.num_kv_heads * spec.head_dim
        assert (block.qkv.in_features, block.qkv.out_features) == (hidden, width)
        assert (block.o.in_features, block.o.out_features) == (heads, hidden)
        args = AttentionBlockArgs(data(block.norm), handle_of(block.qkv), handle_of(block.o), block.norm_eps)
        args.attention = attention_args(cache, spec, Batch())
        return BlockArgs(BlockArgs.ATTENTION, ends_layer, attention=args)
    assert block.gate_up.in_features == block.down.out_features == hidden
    assert block.gate_up.out_features == 2 * block.down.in_features
    mlp = MlpBlockArgs(data(block.norm), handle_of(block.gate_up), handle_of(block.down), block.norm_eps)
    return BlockArgs(BlockArgs.MLP, ends_layer, mlp=mlp)


def linears_of(block: Block) -> tuple[PackedLinear, PackedLinear]:
    """Return the linears of a block in the order in which they are computed."""
    return (block.qkv, block.o) if isinstance(block, AttentionBlock) else (block.gate_up, block.down)


def attention_args(cache: KVCache, spec: AttentionSpec, batch: Batch) -> AttentionArgs:
    """Return the arguments of an attention, without qkv and out."""
    assert isinstance(cache, CpuKVCache)
    assert spec.head_dim == cache.head_dim and spec.num_kv_heads == cache.num_kv_heads
    assert 0 <= spec.layer < cache.layers and spec.num_heads % spec.num_kv_heads == 0
    assert spec.rope_cos.shape == spec.rope_sin.shape and spec.rope_cos.shape[1] == spec.head_dim // 2
    return AttentionArgs(
        *(getattr(batch, field[0]) for field in Batch._fields_),
        cache=cache.handle,
        layer=spec.layer,
        heads=spec.num_heads,
        scale=spec.scale,
        rope_cos=data(spec.rope_cos),
        rope_sin=data(spec.rope_sin),
        q_norm=None if spec.q_norm is None else data(spec.q_norm),
        k_norm=None if spec.k_norm is None else data(spec.k_norm),
        eps=spec.norm_eps,
    )


def limits_of(cache: KVCache, spec: AttentionSpec) -> Limits:
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
