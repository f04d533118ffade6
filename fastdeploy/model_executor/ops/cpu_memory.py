"""Objects in the memory of the C++ ops' library. Their memory is freed together with them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import numpy as np

from fastdeploy.model_executor.ops.interface import LoraPart, PackedAdapter, PackedLinear, PackedLora

MAX_HEAD_DIM = 512


def address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def handle_of(weight: PackedLinear) -> int:
    """Return the library's handle of a weight that these ops packed."""
    assert isinstance(weight, CpuLinear)
    return weight.handle


class CpuLinear:
    """A packed weight in the memory of the library. The memory is freed together with this object."""

    handle: int

    def __init__(self, library: ctypes.CDLL, bf16: bool, out_features: int, in_features: int, with_bias: bool):
        self.handle = library.fd_new_weight(bf16, out_features, in_features, with_bias)
        if not self.handle:
            raise MemoryError(f"no memory for a packed weight of {out_features} x {in_features}")
        self.out_features = out_features
        self.in_features = in_features
        self.with_bias = with_bias
        self.nbytes = library.fd_weight_bytes(self.handle)
        weakref.finalize(self, library.fd_free_weight, self.handle)


class CpuKVCache:
    """KV blocks of all layers in the memory of the library. The system provides each page on first use. The memory is
    freed together with this object."""

    handle: int

    def __init__(
        self, library: ctypes.CDLL, bf16: bool, layers: int, num_blocks: int, block_size: int, heads: int, dim: int
    ):
        assert block_size % 16 == 0, f"block_size {block_size} is not a multiple of 16"
        assert dim % 2 == 0 and dim <= MAX_HEAD_DIM, f"head_dim {dim} is odd or above {MAX_HEAD_DIM}"
        self.handle = library.fd_new_cache(bf16, layers, num_blocks, block_size, heads, dim)
        if not self.handle:
            raise MemoryError(f"no memory for {num_blocks} KV blocks")
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = heads
        self.head_dim = dim
        self.nbytes = library.fd_cache_bytes(self.handle)
        weakref.finalize(self, library.fd_free_cache, self.handle)


class CpuLora:
    """The packed adapter of a linear. See ``Ops.pack_lora``."""

    handle: int

    def __init__(
        self, library: ctypes.CDLL, bf16: bool, parts: Sequence[LoraPart | None], rows: Sequence[int], columns: int
    ):
        ranks = [0 if part is None else part.a.shape[0] for part in parts]
        scaling = [0.0 if part is None else part.scaling for part in parts]
        count = len(parts)
        assert count == len(rows) and max(ranks) > 0
        for part, n, rank in zip(parts, rows, ranks, strict=True):
            if part is not None:
                assert part.a.shape == (rank, columns) and part.b.shape == (n, rank)
                assert part.a.dtype == part.b.dtype and part.a.dtype in (np.uint16, np.float32)
                assert part.a.flags.c_contiguous and part.b.flags.c_contiguous
        sizes = c_int64 * count
        self.handle = library.fd_new_lora(
            bf16, columns, count, sizes(*rows), sizes(*ranks), (c_float * count)(*scaling)
        )
        self.out_features, self.in_features, self.rank = sum(rows), columns, sum(ranks)
        if not self.handle:
            raise MemoryError(
                f"no memory for an adapter of rank {self.rank} of a weight of {self.out_features} x {columns}"
            )
        weakref.finalize(self, library.fd_free_lora, self.handle)
        self.nbytes = library.fd_lora_bytes(self.handle)
        first_rows, first_ranks = np.cumsum([0, *rows]).tolist(), np.cumsum([0, *ranks]).tolist()
        for part, first_row, n, first_rank, rank in zip(parts, first_rows, rows, first_ranks, ranks, strict=False):
            if part is not None:
                source = part.a.dtype == np.uint16
                addresses = address(part.a), address(part.b)
                if library.fd_pack_lora(self.handle, *addresses, source, first_row, n, first_rank, rank):
                    raise MemoryError(f"no memory to pack an adapter of rank {rank}")


def lora_handle(lora: PackedLora | None, linear: PackedLinear) -> int | None:
    """Return the library's handle of the adapter of ``linear``; None if there is no adapter."""
    if lora is None:
        return None
    assert isinstance(lora, CpuLora)
    assert (lora.in_features, lora.out_features) == (linear.in_features, linear.out_features)
    return lora.handle


def gather(library: ctypes.CDLL, adapter: PackedAdapter) -> None:
    """See ``Ops.gather_adapter``."""
    loras = [*(lora for layer in adapter.layers for block in layer for lora in block), adapter.lm_head]
    handles = dict.fromkeys(lora.handle for lora in loras if isinstance(lora, CpuLora))
    if library.fd_gather_loras((c_void_p * len(handles))(*handles), len(handles)):
        raise MemoryError(f"no memory for an adapter of {adapter.nbytes} bytes")
