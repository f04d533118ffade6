"""The C++ CPU ops (custom_ops/cpu_ops), called through ctypes: a call costs some microseconds and releases the GIL.

Environment: FASTDEPLOY_CPU_THREADS (default: the cores the process may use), FASTDEPLOY_CPU_ISA (avx2, avx512 or amx:
the most that may be used; default: what the machine has).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import paddle

from fastdeploy.errors import InvalidField
from fastdeploy.model_executor.ops.interface import AttentionBatch, AttentionSpec, SampleBatch

LIBRARY = Path(__file__).with_name("libfastdeploy_cpu_ops.so")
ISA_NAMES = ("none", "avx2", "avx512", "amx")
MAX_HEAD_DIM = 512

_SIGNATURES = {
    "fd_isa": (c_int, []),
    "fd_set_isa": (c_int, [c_int]),
    "fd_num_threads": (c_int, []),
    "fd_set_num_threads": (None, [c_int]),
    "fd_new_weight": (c_void_p, [c_int, c_int64, c_int64, c_int]),
    "fd_free_weight": (None, [c_void_p]),
    "fd_weight_bytes": (c_int64, [c_void_p]),
    "fd_pack_rows": (None, [c_void_p, c_void_p, c_int, c_int64, c_int64]),
    "fd_set_bias": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_unpack_rows": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "fd_get_bias": (None, [c_void_p, c_void_p]),
    "fd_linear": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_gated_linear": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_embedding": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "fd_rms_norm": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float]),
    "fd_add_rms_norm": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float]),
    "fd_new_cache": (c_void_p, [c_int, c_int64, c_int64, c_int64, c_int64, c_int64]),
    "fd_free_cache": (None, [c_void_p]),
    "fd_cache_bytes": (c_int64, [c_void_p]),
    "fd_copy_blocks": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    "fd_attention": (c_int, [c_void_p]),
    "fd_sample": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "fd_logprobs": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "fd_probe_read": (c_double, [c_void_p]),
    "fd_probe_peak": (c_int64, [c_int64]),
}


_CPU = paddle.CPUPlace()


def _empty(shape: list[int]) -> paddle.Tensor:
    # paddle.empty spends twice as long checking its arguments as allocating
    return paddle._C_ops.empty(shape, paddle.float32, _CPU)


class _AttentionArgs(ctypes.Structure):
    """AttentionArgs of kernels.h."""

    _fields_ = [
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("cache", c_void_p),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("cu_tokens", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("positions", c_void_p),
        ("layer", c_int64),
        ("heads", c_int64),
        ("scale", c_float),
        ("rope_cos", c_void_p),
        ("rope_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
    ]


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the shared library and declare its functions. Raises OSError if it is not there, does not load or finds no
    instruction set that it can use, InvalidField if FASTDEPLOY_CPU_ISA names none."""
    wanted = os.environ.get("FASTDEPLOY_CPU_ISA")
    if wanted is not None and wanted not in ISA_NAMES[1:]:
        raise InvalidField("FASTDEPLOY_CPU_ISA", f"expected one of {', '.join(ISA_NAMES[1:])}, got {wanted!r}")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.fd_isa() == 0:
        raise OSError(f"{path.name} needs a CPU with AVX2 and FMA")
    return library


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class CpuLinear:
    """A packed weight in the library's memory, freed with this object."""

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
    """KV blocks of all layers in the library's memory, freed with this object. Pages are taken on first use."""

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


class CpuOps:
    """Implements ``interface.Ops``. One thread calls at a time, except packing and unpacking, which may run beside
    the others."""

    name = "cpu"

    def __init__(self, dtype: str, library: ctypes.CDLL | None = None):
        assert dtype in ("float32", "bfloat16"), dtype
        self.dtype = dtype
        self._bf16 = dtype == "bfloat16"
        self._lib = library if library is not None else load_library()
        # Per layer, the arguments of the spec last seen: all but qkv, out and the batch stay from step to step.
        # The cache is only watched: it is freed when its owner lets go of it.
        self._specs: dict[int, tuple[AttentionSpec, weakref.ref[CpuKVCache], _AttentionArgs, int]] = {}
        # The batch last seen and its addresses: it stays the same for all layers of a step.
        self._batch: AttentionBatch | None = None
        self._batch_addresses: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def isa(self) -> str:
        """The instruction set in force: avx2, avx512 or amx."""
        return ISA_NAMES[self._lib.fd_isa()]

    def set_isa(self, name: str) -> None:
        """Use at most this instruction set, in the whole process. Packed weights and caches stay valid."""
        self._lib.fd_set_isa(ISA_NAMES.index(name))

    @property
    def num_threads(self) -> int:
        return self._lib.fd_num_threads()

    def set_num_threads(self, count: int) -> None:
        """Replace the thread pool (0: as at start), in the whole process. No op may be running."""
        self._lib.fd_set_num_threads(count)

    def probe_read(self, weight: CpuLinear) -> None:
        """Read the whole weight once, on all threads, as fast as a plain reader can. Needs AMX."""
        assert self.isa == "amx"
        self._lib.fd_probe_read(weight.handle)

    def probe_peak(self, rounds: int) -> int:
        """Multiply AMX tiles in registers, on all threads; returns the floating-point operations done."""
        assert self.isa == "amx"
        return self._lib.fd_probe_peak(rounds)

    def pack_linear(self, parts: list[np.ndarray], bias: list[np.ndarray] | None = None) -> CpuLinear:
        k = parts[0].shape[1]
        source = parts[0].dtype
        assert source in (np.uint16, np.float32), source
        weight = CpuLinear(self._lib, self._bf16, sum(p.shape[0] for p in parts), k, bias is not None)
        row = 0
        for index, part in enumerate(parts):
            assert part.ndim == 2 and part.shape[1] == k and part.dtype == source and part.flags.c_contiguous
            self._lib.fd_pack_rows(weight.handle, _address(part), source == np.uint16, row, part.shape[0])
            if bias is not None:
                values = np.ascontiguousarray(bias[index], np.float32)
                assert values.shape == (part.shape[0],)
                self._lib.fd_set_bias(weight.handle, _address(values), row, part.shape[0])
            row += part.shape[0]
        return weight

    def unpack_linear(self, weight: CpuLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        last = weight.out_features if last is None else last
        assert 0 <= first <= last <= weight.out_features
        rows = np.empty((last - first, weight.in_features), np.uint16 if self._bf16 else np.float32)
        self._lib.fd_unpack_rows(weight.handle, _address(rows), first, last - first)
        return rows

    def unpack_bias(self, weight: CpuLinear) -> np.ndarray | None:
        if not weight.with_bias:
            return None
        bias = np.empty(weight.out_features, np.float32)
        self._lib.fd_get_bias(weight.handle, _address(bias))
        return bias

    def linear(self, x: paddle.Tensor, weight: CpuLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == weight.in_features
        out = _empty([m, weight.out_features])
        _check(self._lib.fd_linear(x.data_ptr(), m, weight.handle, out.data_ptr()))
        return out

    def gated_linear(self, x: paddle.Tensor, weight: CpuLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == weight.in_features and weight.out_features % 2 == 0
        out = _empty([m, weight.out_features // 2])
        _check(self._lib.fd_gated_linear(x.data_ptr(), m, weight.handle, out.data_ptr()))
        return out

    def embedding(self, token_ids: np.ndarray, weight: CpuLinear) -> paddle.Tensor:
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous
        assert token_ids.size == 0 or (token_ids.min() >= 0 and token_ids.max() < weight.out_features)
        m = len(token_ids)
        out = _empty([m, weight.in_features])
        _check(self._lib.fd_embedding(_address(token_ids), m, weight.handle, out.data_ptr()))
        return out

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
        m, h = x.shape
        assert weight.shape == [h]
        out = _empty([m, h])
        _check(self._lib.fd_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), m, h, eps))
        return out

    def add_rms_norm(
        self, x: paddle.Tensor, residual: paddle.Tensor, weight: paddle.Tensor, eps: float
    ) -> paddle.Tensor:
        m, h = x.shape
        assert residual.shape == [m, h] and weight.shape == [h]
        out = _empty([m, h])
        _check(
            self._lib.fd_add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), m, h, eps)
        )
        return out

    def new_kv_cache(
        self, layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> CpuKVCache:
        """block_size: a multiple of 16 (AMX likes 32 better). head_dim: even, at most 512."""
        return CpuKVCache(self._lib, self._bf16, layers, num_blocks, block_size, num_kv_heads, head_dim)

    def copy_blocks(self, cache: CpuKVCache, sources: list[int], targets: list[int]) -> None:
        assert len(sources) == len(targets) and all(0 <= b < cache.num_blocks for b in (*sources, *targets))
        count = len(sources)
        ids = c_int32 * count
        self._lib.fd_copy_blocks(cache.handle, ids(*sources), ids(*targets), count)

    def _args(self, cache: CpuKVCache, spec: AttentionSpec) -> tuple[_AttentionArgs, int]:
        entry = self._specs.get(spec.layer)
        if entry is not None and entry[0] is spec and entry[1]() is cache:
            return entry[2], entry[3]
        assert spec.head_dim == cache.head_dim and spec.num_kv_heads == cache.num_kv_heads
        assert 0 <= spec.layer < cache.layers and spec.num_heads % spec.num_kv_heads == 0
        assert spec.rope_cos.shape == spec.rope_sin.shape and spec.rope_cos.shape[1] == spec.head_dim // 2
        args = _AttentionArgs(
            cache=cache.handle,
            layer=spec.layer,
            heads=spec.num_heads,
            scale=spec.scale,
            rope_cos=spec.rope_cos.data_ptr(),
            rope_sin=spec.rope_sin.data_ptr(),
            q_norm=None if spec.q_norm is None else spec.q_norm.data_ptr(),
            k_norm=None if spec.k_norm is None else spec.k_norm.data_ptr(),
            eps=spec.norm_eps,
        )
        address = ctypes.addressof(args)
        self._specs[spec.layer] = (spec, weakref.ref(cache), args, address)
        return args, address

    def _check_batch(self, batch: AttentionBatch, cache: CpuKVCache, spec: AttentionSpec) -> None:
        assert all(field.dtype == np.int32 and field.flags.c_contiguous for field in batch)
        assert len(batch.cu_tokens) == len(batch.starts) + 1 == len(batch.block_tables) + 1
        assert batch.cu_tokens[0] == 0 and batch.cu_tokens[-1] == len(batch.positions) > 0
        last = batch.starts + np.diff(batch.cu_tokens)  # one past the last position of each sequence
        assert batch.positions.min() >= 0 and last.max() <= spec.rope_cos.shape[0]
        assert last.max() <= batch.block_tables.shape[1] * cache.block_size
        assert batch.block_tables.min() >= 0 and batch.block_tables.max() < cache.num_blocks

    def attention(
        self, qkv: paddle.Tensor, cache: CpuKVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        args, address = self._args(cache, spec)
        tokens, width = qkv.shape
        assert width == (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        out = _empty([tokens, spec.num_heads * spec.head_dim])
        args.qkv, args.out, args.tokens = qkv.data_ptr(), out.data_ptr(), tokens
        args.sequences, args.table_width = batch.block_tables.shape
        if batch is not self._batch:
            self._check_batch(batch, cache, spec)
            self._batch = batch
            self._batch_addresses = (
                _address(batch.cu_tokens),
                _address(batch.starts),
                _address(batch.block_tables),
                _address(batch.positions),
            )
        assert tokens == len(batch.positions)
        args.cu_tokens, args.starts, args.tables, args.positions = self._batch_addresses
        _check(self._lib.fd_attention(address))
        return out

    def sample(self, logits: paddle.Tensor, batch: SampleBatch) -> np.ndarray:
        rows, vocab = logits.shape
        out = np.empty(rows, np.int32)
        temperature = np.ascontiguousarray(batch.temperature, np.float32)
        top_k = np.ascontiguousarray(batch.top_k, np.int32)
        top_p = np.ascontiguousarray(batch.top_p, np.float32)
        min_p = np.ascontiguousarray(batch.min_p, np.float32)
        uniform = np.ascontiguousarray(batch.uniform, np.float64)
        parameters = (temperature, top_k, top_p, min_p, uniform)
        assert all(p.shape == (rows,) for p in parameters)
        _check(self._lib.fd_sample(logits.data_ptr(), rows, vocab, *map(_address, parameters), _address(out)))
        return out

    def logprobs(
        self, logits: paddle.Tensor, token_ids: np.ndarray, top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, vocab = logits.shape
        ids = np.ascontiguousarray(token_ids, np.int32)
        assert ids.shape == (rows,) and 0 <= top <= vocab and (rows == 0 or 0 <= ids.min() <= ids.max() < vocab)
        chosen = np.empty(rows, np.float32)
        values, best = np.empty((rows, top), np.float32), np.empty((rows, top), np.int32)
        _check(
            self._lib.fd_logprobs(
                logits.data_ptr(), rows, vocab, _address(ids), top, _address(chosen), _address(values), _address(best)
            )
        )
        return chosen, values, best


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("no memory for an op's scratch space")
