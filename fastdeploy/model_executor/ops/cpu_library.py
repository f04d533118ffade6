"""The library of the C++ ops (custom_ops/cpu_ops) for ctypes: its functions (api.cc), its structures (kernels.h,
staging.h), and the objects in its memory, which is freed together with them.

Environment: FASTDEPLOY_CPU_THREADS is the number of threads (default: the cores that the process may use).
FASTDEPLOY_CPU_ISA is the highest instruction set to use: avx2, avx512, avx512_bf16 or amx (default: the best of the
machine).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.ops.blocks import (
    BLOCKS,
    Activation,
    AttentionSpec,
    PackedLinear,
    RouterScore,
    RouterSpec,
)
from fastdeploy.model_executor.ops.interface import KVCache, LoraPart, PackedAdapter, PackedLora, Region

LIBRARY = Path(__file__).with_name("libfastdeploy_cpu_ops.so")
ISA_NAMES = ("none", "avx2", "avx512", "avx512_bf16", "amx")
MAX_HEAD_DIM = 576

SIGNATURES = {
    "fd_sizeof": (c_int64, [c_int64]),
    "fd_last_error": (c_char_p, []),
    "fd_isa": (c_int, []),
    "fd_set_isa": (c_int, [c_int]),
    "fd_num_threads": (c_int, []),
    "fd_set_num_threads": (None, [c_int]),
    "fd_free_scratch": (None, []),
    "fd_new_weight": (c_void_p, [c_int, c_int64, c_int64, c_int]),
    "fd_free_weight": (None, [c_void_p]),
    "fd_weight_bytes": (c_int64, [c_void_p]),
    "fd_pack_rows": (c_int, [c_void_p, c_void_p, c_int, c_int64, c_int64]),
    "fd_stage": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_apply_deltas": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_quantize": (c_int, [c_void_p, c_int64, c_void_p]),
    "fd_copy_rows": (c_int, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_set_bias": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_unpack_rows": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_get_bias": (None, [c_void_p, c_void_p]),
    "fd_new_lora": (c_void_p, [c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_free_lora": (None, [c_void_p]),
    "fd_lora_bytes": (c_int64, [c_void_p]),
    "fd_pack_lora": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]),
    "fd_gather_loras": (c_int, [c_void_p, c_int64]),
    "fd_run_layers": (c_int, [c_void_p]),
    "fd_linear": (c_int, [c_void_p, c_void_p, c_float, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_mlp": (c_int, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_embedding": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_new_cache": (c_void_p, [c_int, *[c_int64] * 6]),
    "fd_free_cache": (None, [c_void_p]),
    "fd_cache_bytes": (c_int64, [c_void_p]),
    "fd_copy_blocks": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    "fd_attention": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_attention_tasks": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_sample": (c_int, [c_void_p, c_int64, c_int64, *[c_void_p] * 9]),
    "fd_logprobs": (c_int, [c_void_p, c_int64, c_int64, c_void_p]),
    "fd_probe_read": (c_int, [c_void_p]),
    "fd_probe_peak": (c_int64, [c_int64]),
    "fd_probe_exp2": (None, [c_void_p, c_int64, c_void_p]),
    "fd_probe_silu": (None, [c_void_p, c_int64, c_void_p]),
}


_NUMBERS: dict[Any, Any] = {int: c_int64, Activation: c_int64, RouterScore: c_int64, float: c_float}


def _struct_of(kind: type, **nested: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return the C structure with the fields of a class of ``interface``, in the same order: ``nested`` structures, and
    else int64, float and pointers."""
    fields = [(name, nested.get(name) or _NUMBERS.get(hint, c_void_p)) for name, hint in get_type_hints(kind).items()]
    return type(f"{kind.__name__}Args", (ctypes.Structure,), {"_fields_": fields})


def _integers(names: str) -> list[tuple[str, type[c_int64]]]:
    return [(name, c_int64) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names.split()]


AttentionSpecArgs = _struct_of(AttentionSpec)
RouterSpecArgs = _struct_of(RouterSpec)
RegionArgs = _struct_of(Region)
BLOCK_ARGS = {kind: _struct_of(kind, attention=AttentionSpecArgs, routing=RouterSpecArgs) for kind in BLOCKS}


class BlockArgs(ctypes.Structure):
    """The structure Block of kernels.h. fields: the structure of the kind in BLOCK_ARGS."""

    _fields_ = [*_integers("kind linears ends_layer"), ("fields", c_void_p)]


class Batch(ctypes.Structure):
    """The structure Batch of kernels.h."""

    _fields_ = [*_integers("tokens sequences table_width"), *_pointers("cu_tokens starts tables positions")]


BetweenLayers = ctypes.CFUNCTYPE(c_int)


class StepArgs(ctypes.Structure):
    """The structure StepArgs of kernels.h."""

    _fields_ = [("batch", Batch), *_pointers("cache residual rows"), ("num_rows", c_int64)]
    _fields_ += [("blocks", c_void_p), ("count", c_int64), *_pointers("adapters adapter_rows routing")]
    _fields_ += [*_integers("experts_layers forced"), ("between_layers", BetweenLayers)]


class LogprobArgs(ctypes.Structure):
    """The structure LogprobArgs of kernels.h."""

    _inputs = ["ids", "temperature", "cutoff_logits", "cutoff_ids", "other_ids", "other_ends"]
    _outputs = ["chosen", "ranks", "top_values", "top_ids", "other_values"]
    _fields_ = [*((name, c_void_p) for name in _inputs), ("top", c_int64), *((name, c_void_p) for name in _outputs)]


class StageItemArgs(ctypes.Structure):
    """The structure StageItem of staging.h."""

    _fields_ = [("region", RegionArgs), *_integers("kind offset fd"), ("memory", c_void_p)]
    _fields_ += _integers("memory_bytes stride run step")


class DeltaItemArgs(ctypes.Structure):
    """The structure DeltaItem of staging.h."""

    _fields_ = [("region", RegionArgs), ("payload", c_void_p), ("payload_bytes", c_int64)]


class StageResultArgs(ctypes.Structure):
    """The structure StageResult of staging.h."""

    _fields_ = [("first", c_uint64), ("second", c_uint64), *_integers("problem error")]


# By their number for fd_sizeof.
STRUCTS: dict[int, type[ctypes.Structure]] = dict(
    enumerate(
        (AttentionSpecArgs, BlockArgs, StepArgs, StageItemArgs, DeltaItemArgs, StageResultArgs, *BLOCK_ARGS.values())
    )
)


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the shared library and declare its functions.

    Raises OSError if the library is missing, does not load, was built from other sources, or needs an instruction set
    that this CPU does not have; InvalidField if FASTDEPLOY_CPU_ISA names no instruction set.
    """
    wanted = os.environ.get("FASTDEPLOY_CPU_ISA")
    if wanted is not None and wanted not in ISA_NAMES[1:]:
        raise InvalidField("FASTDEPLOY_CPU_ISA", f"expected one of {', '.join(ISA_NAMES[1:])}, got {wanted!r}")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise OSError(f"{path.name} is of another version: it has no {name}")
        function.restype, function.argtypes = result, arguments
    for number, struct in STRUCTS.items():
        theirs, ours = library.fd_sizeof(number), ctypes.sizeof(struct)
        if theirs != ours:
            what = f"{struct.__name__} has {theirs} bytes there and {ours} here"
            raise OSError(f"{path.name} is of another version: {what}")
    if library.fd_isa() == 0:
        raise OSError(f"{path.name} needs a CPU with AVX2 and FMA")
    return library


def address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _free_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    """Call ``free`` when the owner is deleted, but not at the end of the process: a thread may still use the memory."""
    weakref.finalize(owner, free, handle).atexit = False


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
        self.quantized = False
        self._library, self._bf16 = library, bf16
        _free_with(self, library.fd_free_weight, self.handle)

    @property
    def nbytes(self) -> int:
        nbytes: int = self._library.fd_weight_bytes(self.handle)
        return nbytes

    def pack(self, rows: np.ndarray, first: int) -> None:
        """Pack rows [n, in_features], float32 or bfloat16 as uint16 bits, as rows from ``first`` on."""
        assert rows.ndim == 2 and rows.shape[1] == self.in_features and rows.flags.c_contiguous
        assert rows.dtype in (np.uint16, np.float32) and 0 <= first <= first + len(rows) <= self.out_features
        status = self._library.fd_pack_rows(self.handle, address(rows), rows.dtype == np.uint16, first, len(rows))
        if status:
            raise MemoryError(f"no memory to pack {len(rows)} x {self.in_features} values")

    def unpack(self, first: int, last: int) -> np.ndarray:
        """See ``Ops.unpack_linear``."""
        assert 0 <= first <= last <= self.out_features
        rows = np.empty((last - first, self.in_features), np.uint16 if self._bf16 else np.float32)
        self._library.fd_unpack_rows(self.handle, address(rows), first, last - first)
        return rows

    def transposed_heads(self, heads: int, rows: int) -> CpuLinear:
        """See ``PackedLinear.transposed_heads``."""
        columns, step = self.in_features, self.out_features // heads
        found = CpuLinear(self._library, self._bf16, heads * columns, rows, False)
        for head in range(heads):
            of_head = self.unpack(head * step, head * step + rows)
            found.pack(np.ascontiguousarray(of_head.T), head * columns)
        return found


class CpuKVCache:
    """KV blocks of all layers in the memory of the library. The system provides each page on first use. The memory is
    freed together with this object."""

    handle: int

    def __init__(
        self,
        library: ctypes.CDLL,
        bf16: bool,
        layers: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        keys_only: bool,
    ):
        assert block_size % 16 == 0, f"block_size {block_size} is not a multiple of 16"
        assert dim % 2 == 0 and dim <= MAX_HEAD_DIM, f"head_dim {dim} is odd or above {MAX_HEAD_DIM}"
        parts = 1 if keys_only else 2
        self.handle = library.fd_new_cache(bf16, layers, num_blocks, block_size, heads, dim, parts)
        if not self.handle:
            raise MemoryError(f"no memory for {num_blocks} KV blocks")
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = heads
        self.head_dim = dim
        self.keys_only = keys_only
        self.nbytes = library.fd_cache_bytes(self.handle)
        _free_with(self, library.fd_free_cache, self.handle)


def cache_handle(cache: KVCache) -> int:
    """Return the library's handle of a cache that these ops made."""
    assert isinstance(cache, CpuKVCache)
    return cache.handle


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
        _free_with(self, library.fd_free_lora, self.handle)
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
