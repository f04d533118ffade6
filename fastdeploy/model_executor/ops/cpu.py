"""The C++ CPU ops (custom_ops/cpu_ops), called through ctypes. A call costs some microseconds and releases the GIL."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.model_executor.ops.cpu_library import (
    ISA_NAMES,
    AttentionArgs,
    AttentionBlockArgs,
    Batch,
    BetweenLayers,
    BlockArgs,
    MlpBlockArgs,
    StepArgs,
    load_library,
)
from fastdeploy.model_executor.ops.interface import (
    AttentionBatch,
    AttentionBlock,
    AttentionSpec,
    Block,
    DecoderLayer,
    KVCache,
    PackedLinear,
    SampleBatch,
)

MAX_HEAD_DIM = 512

_CPU = paddle.CPUPlace()
_FLOAT32 = (paddle.float32,)  # `x in` compares identity first; `==` between dtypes costs five times as much


def _empty(shape: list[int]) -> paddle.Tensor:
    # paddle.empty spends twice as long checking its arguments as allocating
    return paddle._C_ops.empty(shape, paddle.float32, _CPU)


class _Limits(NamedTuple):
    """Limits of a batch: block ids are below num_blocks, positions below max_len (the length of the rope tables)."""

    num_blocks: int
    block_size: int
    max_len: int


class _Prepared(NamedTuple):
    """Arguments of all blocks, reused in every step. References to layers and cache are weak, so that their owner can
    free them. hidden: the width of the residual."""

    layers: list[weakref.ref[DecoderLayer]]
    cache: weakref.ref[CpuKVCache]
    limits: _Limits
    hidden: int
    blocks: ctypes.Array[BlockArgs]


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _handle(weight: PackedLinear) -> int:
    """Return the library's handle of a weight that these ops packed."""
    assert isinstance(weight, CpuLinear)
    return weight.handle


def _data(tensor: paddle.Tensor) -> int:
    """Return the address of a contiguous float32 tensor. A view such as a transpose is refused."""
    assert tensor.dtype in _FLOAT32 and tensor.is_contiguous()
    return tensor.data_ptr()


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


class CpuOps:
    """Implements ``interface.Ops``. One thread at a time may call an op; packing and unpacking may run beside it."""

    name = "cpu"

    def __init__(self, dtype: str, library: ctypes.CDLL | None = None):
        assert dtype in ("float32", "bfloat16"), dtype
        self.dtype = dtype
        self._bf16 = dtype == "bfloat16"
        self._lib = library if library is not None else load_library()
        self._prepared: _Prepared | None = None
        self._logits: paddle.Tensor | None = None  # kept: new pages for [M, V] cost more than the product

    @property
    def isa(self) -> str:
        """The instruction set in force: avx2, avx512 or amx."""
        return ISA_NAMES[self._lib.fd_isa()]

    def set_isa(self, name: str) -> None:
        """Use at most this instruction set, in the whole process. Packed weights and caches stay valid."""
        self._lib.fd_set_isa(ISA_NAMES.index(name))

    @property
    def num_threads(self) -> int:
        count: int = self._lib.fd_num_threads()
        return count

    def set_num_threads(self, count: int) -> None:
        """Replace the thread pool (0: as at start), in the whole process. No op may be running."""
        self._lib.fd_set_num_threads(count)

    def free_scratch(self) -> None:
        """See ``Ops.free_scratch``."""
        self._logits = None
        self._lib.fd_free_scratch()

    def probe_read(self, weight: PackedLinear) -> None:
        """Read the whole weight once, on all threads, at the speed of a plain reader. Needs AVX-512."""
        assert self.isa in ("avx512", "amx")
        self._lib.fd_probe_read(_handle(weight))

    def probe_peak(self, rounds: int) -> int:
        """Multiply AMX tiles in registers, on all threads. Returns the number of floating-point operations."""
        assert self.isa == "amx"
        operations: int = self._lib.fd_probe_peak(rounds)
        return operations

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

    def unpack_linear(self, weight: PackedLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        last = weight.out_features if last is None else last
        assert 0 <= first <= last <= weight.out_features
        rows = np.empty((last - first, weight.in_features), np.uint16 if self._bf16 else np.float32)
        self._lib.fd_unpack_rows(_handle(weight), _address(rows), first, last - first)
        return rows

    def unpack_bias(self, weight: PackedLinear) -> np.ndarray | None:
        assert isinstance(weight, CpuLinear)
        if not weight.with_bias:
            return None
        bias = np.empty(weight.out_features, np.float32)
        self._lib.fd_get_bias(weight.handle, _address(bias))
        return bias

    def decoder_layers(
        self,
        residual: paddle.Tensor,
        layers: Sequence[DecoderLayer],
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray | None = None,
        between_layers: Callable[[], None] | None = None,
    ) -> paddle.Tensor:
        prepared = self._prepare(layers, cache)
        tokens, hidden = residual.shape
        assert hidden == prepared.hidden
        step = StepArgs(_batch_args(batch, prepared.limits, tokens), self._bf16, _data(residual))
        if rows is not None:
            assert rows.dtype == np.int64 and rows.flags.c_contiguous and len(rows) <= tokens
            assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < tokens and np.all(rows[1:] > rows[:-1]))
            step.rows, step.num_rows = _address(rows), len(rows)
        step.blocks, step.count = ctypes.addressof(prepared.blocks), len(prepared.blocks)
        raised: list[BaseException] = []
        if between_layers is not None:
            step.between_layers = BetweenLayers(lambda: _called(between_layers, raised))
        status = self._lib.fd_run_layers(ctypes.addressof(step))
        if raised:
            raise raised.pop()
        self._check(status)
        return residual if rows is None else residual[: len(rows)]

    def logits(self, x: paddle.Tensor, norm: paddle.Tensor, eps: float, head: PackedLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == head.in_features and norm.shape == [k]
        if self._logits is None or self._logits.shape[0] < m or self._logits.shape[1] != head.out_features:
            self._logits = None  # frees the old memory before the new is allocated
            self._logits = _empty([_logits_rows(m), head.out_features])
        out = self._logits[:m]
        self._check(self._lib.fd_linear(_data(x), _data(norm), eps, m, _handle(head), out.data_ptr()))
        return out

    def linear(self, x: paddle.Tensor, weight: PackedLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == weight.in_features
        out = _empty([m, weight.out_features])
        self._check(self._lib.fd_linear(_data(x), None, 0.0, m, _handle(weight), out.data_ptr()))
        return out

    def mlp(self, x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == gate_up.in_features and gate_up.out_features == 2 * down.in_features
        out = _empty([m, down.out_features])
        self._check(self._lib.fd_mlp(_data(x), m, _handle(gate_up), _handle(down), out.data_ptr()))
        return out

    def embedding(self, token_ids: np.ndarray, weight: PackedLinear) -> paddle.Tensor:
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous
        assert token_ids.size == 0 or (token_ids.min() >= 0 and token_ids.max() < weight.out_features)
        m = len(token_ids)
        out = _empty([m, weight.in_features])
        self._check(self._lib.fd_embedding(_address(token_ids), m, _handle(weight), out.data_ptr()))
        return out

    def new_kv_cache(
        self, layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> CpuKVCache:
        """block_size: a multiple of 16 (AMX likes 32 better). head_dim: even, at most 512."""
        return CpuKVCache(self._lib, self._bf16, layers, num_blocks, block_size, num_kv_heads, head_dim)

    def copy_blocks(self, cache: KVCache, sources: list[int], targets: list[int]) -> None:
        assert isinstance(cache, CpuKVCache)
        assert len(sources) == len(targets) and all(0 <= b < cache.num_blocks for b in (*sources, *targets))
        count = len(sources)
        ids = c_int32 * count
        self._lib.fd_copy_blocks(cache.handle, ids(*sources), ids(*targets), count)

    def _check(self, status: int) -> None:
        """Raise MemoryError, or RuntimeError for any other failure, such as a thread that cannot be started. The
        results of the op are lost; the next call works again."""
        if status == -1:
            raise MemoryError("no memory for an op's scratch space")
        if status != 0:
            raise RuntimeError(f"an op failed: {self._lib.fd_last_error().decode(errors='replace')}")

    def _prepare(self, layers: Sequence[DecoderLayer], cache: KVCache) -> _Prepared:
        assert isinstance(cache, CpuKVCache)
        found = self._prepared
        if (
            found is None
            or found.cache() is not cache
            or len(found.layers) != len(layers)
            or any(known() is not layer for known, layer in zip(found.layers, layers, strict=True))
        ):
            blocks = [(block, i == len(layer.blocks)) for layer in layers for i, block in enumerate(layer.blocks, 1)]
            limits = {_limits(cache, block.attention) for block, _ in blocks if isinstance(block, AttentionBlock)}
            hidden = {block.norm.shape[0] for block, _ in blocks}
            assert len(limits) == len(hidden) == 1
            args = (BlockArgs * len(blocks))(*(_block_args(block, ends, cache) for block, ends in blocks))
            found = _Prepared(list(map(weakref.ref, layers)), weakref.ref(cache), limits.pop(), hidden.pop(), args)
            self._prepared = found
        return found

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        tokens, width = qkv.shape
        assert width == (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        out = _empty([tokens, spec.num_heads * spec.head_dim])
        args = _attention_args(cache, spec, _batch_args(batch, _limits(cache, spec), tokens))
        args.qkv, args.out = _data(qkv), out.data_ptr()
        self._check(self._lib.fd_attention(ctypes.addressof(args)))
        return out

    def attention_tasks(self, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec) -> int:
        """Return the number of tasks that ``attention`` makes of this batch. With AMX, neighbouring sequences that
        decode behind the same blocks are one task, which reads these blocks once."""
        args = _attention_args(cache, spec, _batch_args(batch, _limits(cache, spec), len(batch.positions)))
        count = c_int64()
        self._check(self._lib.fd_attention_tasks(ctypes.addressof(args), ctypes.addressof(count)))
        return count.value

    def sample(self, logits: paddle.Tensor, batch: SampleBatch) -> np.ndarray:
        rows, vocab = logits.shape
        out = np.empty(rows, np.int32)
        kinds = (np.float32, np.int32, np.float32, np.float32, np.float64)
        parameters = [np.ascontiguousarray(field, kind) for field, kind in zip(batch, kinds, strict=True)]
        assert all(p.shape == (rows,) for p in parameters)
        self._check(self._lib.fd_sample(_data(logits), rows, vocab, *map(_address, parameters), _address(out)))
        return out

    def logprobs(
        self, logits: paddle.Tensor, token_ids: np.ndarray, top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, vocab = logits.shape
        ids = np.ascontiguousarray(token_ids, np.int32)
        assert ids.shape == (rows,) and 0 <= top <= vocab and (rows == 0 or 0 <= ids.min() <= ids.max() < vocab)
        chosen = np.empty(rows, np.float32)
        values, best = np.empty((rows, top), np.float32), np.empty((rows, top), np.int32)
        self._check(
            self._lib.fd_logprobs(
                _data(logits), rows, vocab, _address(ids), top, _address(chosen), _address(values), _address(best)
            )
        )
        return chosen, values, best


def _called(between_layers: Callable[[], None], raised: list[BaseException]) -> int:
    """Call ``between_layers`` for C++, through which no Python error can pass. After an error, appends the error to
    ``raised`` and returns 1, which ends the step."""
    try:
        between_layers()
    except BaseException as error:
        raised.append(error)
        return 1
    return 0


def _block_args(block: Block, ends_layer: bool, cache: KVCache) -> BlockArgs:
    """Return the arguments of a block, without those of the batch."""
    [hidden] = block.norm.shape
    if isinstance(block, AttentionBlock):
        spec = block.attention
        heads = spec.num_heads * spec.head_dim
        width = heads + 2 * spec.num_kv_heads * spec.head_dim
        assert (block.qkv.in_features, block.qkv.out_features) == (hidden, width)
        assert (block.o.in_features, block.o.out_features) == (heads, hidden)
        args = AttentionBlockArgs(_data(block.norm), _handle(block.qkv), _handle(block.o), block.norm_eps)
        args.attention = _attention_args(cache, spec, Batch())
        return BlockArgs(BlockArgs.ATTENTION, ends_layer, attention=args)
    assert block.gate_up.in_features == block.down.out_features == hidden
    assert block.gate_up.out_features == 2 * block.down.in_features
    mlp = MlpBlockArgs(_data(block.norm), _handle(block.gate_up), _handle(block.down), block.norm_eps)
    return BlockArgs(BlockArgs.MLP, ends_layer, mlp=mlp)


def _attention_args(cache: KVCache, spec: AttentionSpec, batch: Batch) -> AttentionArgs:
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
        rope_cos=_data(spec.rope_cos),
        rope_sin=_data(spec.rope_sin),
        q_norm=None if spec.q_norm is None else _data(spec.q_norm),
        k_norm=None if spec.k_norm is None else _data(spec.k_norm),
        eps=spec.norm_eps,
    )


def _logits_rows(m: int) -> int:
    """Return the rows to allocate for m rows, so that a batch that grows one by one seldom allocates: powers of two up
    to 64, then multiples of 64, because 64 rows of a vocabulary of 150,000 are 37 MiB."""
    return 1 << (m - 1).bit_length() if m <= 64 else -(-m // 64) * 64


def _limits(cache: KVCache, spec: AttentionSpec) -> _Limits:
    return _Limits(cache.num_blocks, cache.block_size, spec.rope_cos.shape[0])


def _batch_args(batch: AttentionBatch, limits: _Limits, tokens: int) -> Batch:
    """Return the arguments of a batch; they are valid while ``batch`` lives."""
    _check_batch(batch, limits)
    assert tokens == len(batch.positions)
    sequences, width = batch.block_tables.shape
    addresses = [_address(field) for field in (batch.cu_tokens, batch.starts, batch.block_tables, batch.positions)]
    return Batch(tokens, sequences, width, *addresses)


def _check_batch(batch: AttentionBatch, limits: _Limits) -> None:
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
