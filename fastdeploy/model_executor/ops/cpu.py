"""The C++ CPU ops (custom_ops/cpu_ops), called through ctypes. A call costs some microseconds and releases the GIL."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import (
    ATTENTIONS,
    AttentionSpec,
    DecoderLayer,
    LatentAttentionBlock,
    PackedLinear,
)
from fastdeploy.model_executor.ops.cpu_arguments import (
    Handles,
    Limits,
    RoutingLimits,
    adapter_handles,
    adapter_rows,
    batch_args,
    block_args,
    data,
    delta_item,
    limits_of,
    logprob_args,
    pointers,
    routing_limits,
    routing_rows,
    sample_arrays,
    spec_args,
    stage_item,
    stage_result,
    stop_flag,
)
from fastdeploy.model_executor.ops.cpu_library import (
    ISA_NAMES,
    BetweenLayers,
    BlockArgs,
    CpuKVCache,
    CpuLinear,
    CpuLora,
    DeltaItemArgs,
    StageItemArgs,
    StageResultArgs,
    StepArgs,
    address,
    cache_handle,
    gather,
    handle_of,
    load_library,
    lora_handle,
)
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    DeltaItem,
    KVCache,
    LoraPart,
    PackedAdapter,
    Routing,
    StageItem,
    StageResult,
)
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks

_CPU = paddle.CPUPlace()


def _empty(shape: list[int]) -> paddle.Tensor:
    # paddle.empty spends twice as long checking its arguments as allocating
    return paddle._C_ops.empty(shape, paddle.float32, _CPU)


class _Prepared(NamedTuple):
    """Arguments of all blocks, reused in every step. References to layers and cache are weak, so that their owner can
    free them. hidden: the width of the residual. fields: what ``blocks`` points to. adapters: handles of the linears
    of those adapters that were used with these layers and are still alive."""

    layers: list[weakref.ref[DecoderLayer]]
    cache: weakref.ref[CpuKVCache]
    limits: Limits
    routing: RoutingLimits | None
    hidden: int
    blocks: ctypes.Array[BlockArgs]
    fields: Sequence[ctypes.Structure]
    adapters: weakref.WeakKeyDictionary[PackedAdapter, Handles]


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
        """The instruction set in force: avx2, avx512, avx512_bf16 or amx."""
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
        """Read the whole weight once, on all threads, at the speed of a plain reader."""
        self._check(self._lib.fd_probe_read(handle_of(weight)))

    def probe_peak(self, rounds: int) -> int:
        """Multiply bfloat16 in registers (AMX tiles, or VDPBF16PS), on all threads. Returns the number of
        floating-point operations."""
        assert self.isa in ("avx512_bf16", "amx")
        operations: int = self._lib.fd_probe_peak(rounds)
        return operations

    def pack_linear(self, parts: list[np.ndarray], bias: list[np.ndarray] | None = None) -> CpuLinear:
        k, source = parts[0].shape[1], parts[0].dtype
        weight = CpuLinear(self._lib, self._bf16, sum(p.shape[0] for p in parts), k, bias is not None)
        row = 0
        for index, part in enumerate(parts):
            assert part.dtype == source
            weight.pack(part, row)
            if bias is not None:
                values = np.ascontiguousarray(bias[index], np.float32)
                assert values.shape == (part.shape[0],)
                self._lib.fd_set_bias(weight.handle, address(values), row, part.shape[0])
            row += part.shape[0]
        return weight

    def new_linear(self, rows: int, columns: int, bias: bool) -> CpuLinear:
        return CpuLinear(self._lib, self._bf16, rows, columns, bias)

    def set_bias(self, weight: PackedLinear, first: int, bias: np.ndarray) -> None:
        assert bias.dtype == np.float32 and bias.flags.c_contiguous and first + len(bias) <= weight.out_features
        self._lib.fd_set_bias(handle_of(weight), address(bias), first, len(bias))

    def stage(self, items: Sequence[StageItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
        return self._stage(self._lib.fd_stage, StageItemArgs, [stage_item(item) for item in items], stop, dtype)

    def apply_deltas(self, items: Sequence[DeltaItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
        return self._stage(self._lib.fd_apply_deltas, DeltaItemArgs, [delta_item(item) for item in items], stop, dtype)

    def _stage(self, op: Any, kind: Any, items: list[Any], stop: np.ndarray, dtype: str) -> list[StageResult]:
        bf16 = self._bf16 and dtype != "float32"
        results = (StageResultArgs * len(items))()
        self._check(op(bf16, (kind * len(items))(*items), len(items), stop_flag(stop), results))
        return [stage_result(result) for result in results]

    def copy_rows(self, target: PackedLinear, source: PackedLinear, first: int, last: int) -> None:
        assert (target.out_features, target.in_features) == (source.out_features, source.in_features)
        assert 0 <= first <= last <= target.out_features
        assert isinstance(target, CpuLinear) and isinstance(source, CpuLinear) and target.with_bias == source.with_bias
        self._check(self._lib.fd_copy_rows(target.handle, source.handle, first, last))

    def quantize(self, weights: Sequence[PackedLinear], stop: np.ndarray) -> None:
        assert self._bf16
        self._check(self._lib.fd_quantize(pointers(list(map(handle_of, weights))), len(weights), stop_flag(stop)))
        for weight in weights:
            weight.quantized = True

    def unpack_linear(self, weight: PackedLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        assert isinstance(weight, CpuLinear)
        return weight.unpack(first, weight.out_features if last is None else last)

    def unpack_bias(self, weight: PackedLinear) -> np.ndarray | None:
        assert isinstance(weight, CpuLinear)
        if not weight.with_bias:
            return None
        bias = np.empty(weight.out_features, np.float32)
        self._lib.fd_get_bias(weight.handle, address(bias))
        return bias

    def pack_lora(self, parts: Sequence[LoraPart | None], rows: Sequence[int], columns: int) -> CpuLora:
        return CpuLora(self._lib, self._bf16, parts, rows, columns)

    def gather_adapter(self, adapter: PackedAdapter) -> None:
        gather(self._lib, adapter)

    def decoder_layers(
        self,
        residual: paddle.Tensor,
        layers: Sequence[DecoderLayer],
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray | None = None,
        between_layers: Callable[[], None] | None = None,
        adapters: AdapterRows | None = None,
        routing: Routing | None = None,
    ) -> paddle.Tensor:
        prepared = self._prepare(layers, cache)
        tokens, hidden = residual.shape
        assert hidden == prepared.hidden
        step = StepArgs(batch_args(batch, prepared.limits, tokens), cache_handle(cache), data(residual))
        if rows is not None:
            assert rows.dtype == np.int64 and rows.flags.c_contiguous and len(rows) <= tokens
            assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < tokens and np.all(rows[1:] > rows[:-1]))
            step.rows, step.num_rows = address(rows), len(rows)
        step.blocks, step.count = ctypes.addressof(prepared.blocks), len(prepared.blocks)
        if adapters is not None:
            known = [adapter_handles(prepared.adapters, adapter, layers) for adapter in adapters.adapters]
            table = pointers([ctypes.addressof(handles) for handles in known])
            step.adapters, step.adapter_rows = ctypes.addressof(table), adapter_rows(adapters, tokens)
        if routing is not None:
            assert prepared.routing is not None
            step.routing = routing_rows(routing, prepared.routing, tokens)
            step.experts_layers, step.forced = prepared.routing.layers, routing.forced
        raised: list[BaseException] = []
        if between_layers is not None:
            step.between_layers = BetweenLayers(lambda: _called(between_layers, raised))
        status = self._lib.fd_run_layers(ctypes.addressof(step))
        if raised:
            raise raised.pop()
        self._check(status)
        return residual if rows is None else residual[: len(rows)]

    def logits(
        self,
        x: paddle.Tensor,
        norm: paddle.Tensor,
        eps: float,
        head: PackedLinear,
        adapters: AdapterRows | None = None,
    ) -> paddle.Tensor:
        m, k = x.shape
        assert k == head.in_features and norm.shape == [k]
        if self._logits is None or self._logits.shape[0] < m or self._logits.shape[1] != head.out_features:
            self._logits = None  # frees the old memory before the new is allocated
            self._logits = _empty([_logits_rows(m), head.out_features])
        out = self._logits[:m]
        table = rows = None
        if adapters is not None and any(adapter.lm_head is not None for adapter in adapters.adapters):
            loras = pointers([lora_handle(adapter.lm_head, head) for adapter in adapters.adapters])
            size = ctypes.sizeof(c_void_p)
            table = pointers([ctypes.addressof(loras) + i * size for i in range(len(loras))])
            rows = adapter_rows(adapters, m)
        self._check(self._lib.fd_linear(data(x), data(norm), eps, m, handle_of(head), table, rows, out.data_ptr()))
        return out

    def linear(self, x: paddle.Tensor, weight: PackedLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == weight.in_features
        out = _empty([m, weight.out_features])
        self._check(self._lib.fd_linear(data(x), None, 0.0, m, handle_of(weight), None, None, out.data_ptr()))
        return out

    def mlp(self, x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear) -> paddle.Tensor:
        m, k = x.shape
        assert k == gate_up.in_features and gate_up.out_features == 2 * down.in_features
        out = _empty([m, down.out_features])
        self._check(self._lib.fd_mlp(data(x), m, handle_of(gate_up), handle_of(down), out.data_ptr()))
        return out

    def embedding(self, token_ids: np.ndarray, weight: PackedLinear) -> paddle.Tensor:
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous
        assert token_ids.size == 0 or (token_ids.min() >= 0 and token_ids.max() < weight.out_features)
        m = len(token_ids)
        out = _empty([m, weight.in_features])
        self._check(self._lib.fd_embedding(address(token_ids), m, handle_of(weight), out.data_ptr()))
        return out

    def new_kv_cache(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        keys_only: bool = False,
    ) -> CpuKVCache:
        """block_size: a multiple of 16 (AMX likes 32 better). head_dim: even, at most 576."""
        return CpuKVCache(self._lib, self._bf16, layers, num_blocks, block_size, num_kv_heads, head_dim, keys_only)

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
            limits = {limits_of(cache, block.attention) for block, _ in blocks if isinstance(block, ATTENTIONS)}
            latent = {isinstance(block, LatentAttentionBlock) for block, _ in blocks if isinstance(block, ATTENTIONS)}
            assert latent == {cache.keys_only}
            hidden = {block.norm.shape[0] for block, _ in blocks}
            assert len(limits) == len(hidden) == 1
            args, fields = zip(*(block_args(block, ends) for block, ends in blocks), strict=True)
            found = self._prepared = _Prepared(
                list(map(weakref.ref, layers)),
                weakref.ref(cache),
                limits.pop(),
                routing_limits([block for block, _ in blocks]),
                hidden.pop(),
                (BlockArgs * len(args))(*args),
                fields,
                weakref.WeakKeyDictionary(),
            )
        return found

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        tokens, width = qkv.shape
        parts = 1 if cache.keys_only else 2
        assert width == (spec.num_heads + parts * spec.num_kv_heads) * spec.head_dim
        out = _empty([tokens, spec.num_heads * spec.head_dim])
        args = self._attention_args(cache, batch, spec, tokens)
        self._check(self._lib.fd_attention(*args, data(qkv), out.data_ptr()))
        return out

    def attention_tasks(self, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec) -> int:
        """Return the number of tasks that ``attention`` makes of this batch. With AMX, neighbouring sequences that
        decode behind the same blocks are one task, which reads these blocks once."""
        count = c_int64()
        args = self._attention_args(cache, batch, spec, len(batch.positions))
        self._check(self._lib.fd_attention_tasks(*args, ctypes.byref(count)))
        return count.value

    def _attention_args(self, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec, tokens: int) -> tuple:
        args = batch_args(batch, limits_of(cache, spec), tokens), spec_args(spec)
        return *map(ctypes.byref, args), cache_handle(cache)

    def sample(
        self,
        logits: paddle.Tensor,
        batch: SampleBatch,
        cutoff: Cutoff | None = None,
        masks: TokenMasks | None = None,
    ) -> np.ndarray:
        rows, vocab = logits.shape
        out = np.empty(rows, np.int32)
        arrays = sample_arrays(batch, cutoff, masks, rows, vocab)
        given = [None if array is None else address(array) for array in arrays]
        written = (None, None) if cutoff is None else map(address, cutoff)
        self._check(self._lib.fd_sample(data(logits), rows, vocab, *given, address(out), *written))
        return out

    def logprobs(self, logits: paddle.Tensor, batch: LogprobBatch) -> TokenLogprobs:
        rows, vocab = logits.shape
        args, found = logprob_args(batch, rows, vocab)
        self._check(self._lib.fd_logprobs(data(logits), rows, vocab, ctypes.byref(args)))
        return found


def _called(between_layers: Callable[[], None], raised: list[BaseException]) -> int:
    """Call ``between_layers`` for C++, through which no Python error can pass. After an error, appends the error to
    ``raised`` and returns 1, which ends the step."""
    try:
        between_layers()
    except BaseException as error:
        raised.append(error)
        return 1
    return 0


def _logits_rows(m: int) -> int:
    """Return the rows to allocate for m rows, so that a batch that grows one by one seldom allocates: powers of two up
    to 64, then multiples of 64, because 64 rows of a vocabulary of 150,000 are 37 MiB."""
    return 1 << (m - 1).bit_length() if m <= 64 else -(-m // 64) * 64
