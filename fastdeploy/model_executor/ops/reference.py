"""The reference of every op in plain Paddle. The C++ ops are compared with it, and it runs where there is no compiler.

All ops compute in float32. With dtype "bfloat16" weights and cached keys and values are rounded to bfloat16 once, and
stored as float32. A matrix product has the same shape for every batch: rows are computed in tiles of ``ROWS``, and keys
in tiles of ``KEYS``, both padded, so that a BLAS that picks its kernel by shape picks the same one for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import (
    ATTENTIONS,
    Activation,
    AttentionBlock,
    AttentionSpec,
    DecoderLayer,
    ExpertsBlock,
    LatentAttentionBlock,
    MlpBlock,
    PackedLinear,
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
from fastdeploy.model_executor.ops.reference_experts import gated_mlp, mixture
from fastdeploy.model_executor.ops.reference_sampling import draw, inside, scores
from fastdeploy.model_executor.ops.reference_tiles import (
    LoraRows,
    attend,
    contained,
    head_products,
    linear_in_tiles,
    lora_rows,
    rotate,
    slots_of,
)
from fastdeploy.model_executor.ops.reference_weights import (
    ReferenceLinear,
    ReferenceLora,
    ReferencePart,
    apply_deltas,
    quantized,
    stage,
    to_float32,
)
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even. The result is float32; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(array), array, rounded)


@dataclass
class ReferenceKVCache:
    """The KV cache of the reference ops: two tensors per layer, [num_blocks * block_size, num_kv_heads, head_dim]. With
    keys_only, ``values`` are the same tensors as ``keys``."""

    keys: list[paddle.Tensor]
    values: list[paddle.Tensor]
    num_blocks: int
    block_size: int
    keys_only: bool
    nbytes: int


class ReferenceOps:
    """Implements ``interface.Ops``; see there for shapes."""

    name = "reference"

    def __init__(self, dtype: str):
        assert dtype in ("float32", "bfloat16")
        self.dtype = dtype

    def pack_linear(self, parts: list[np.ndarray], bias: list[np.ndarray] | None = None) -> ReferenceLinear:
        stacked, row = np.empty((sum(len(part) for part in parts), parts[0].shape[1]), np.float32), 0
        for part in parts:
            for first in range(0, len(part), 4096):  # in slices, since the conversions make copies
                piece = part[first : first + 4096]
                stacked[row : row + len(piece)] = self._rounded(to_float32(piece))
                row += len(piece)
        packed_bias = None if bias is None else paddle.to_tensor(np.concatenate(bias).astype(np.float32))
        out_features, in_features = stacked.shape
        return ReferenceLinear(paddle.to_tensor(stacked), packed_bias, out_features, in_features, stacked.nbytes)

    def new_linear(self, rows: int, columns: int, bias: bool) -> ReferenceLinear:
        packed_bias = paddle.zeros([rows], "float32") if bias else None
        return ReferenceLinear(paddle.zeros([rows, columns], "float32"), packed_bias, rows, columns, 4 * rows * columns)

    def set_bias(self, weight: PackedLinear, first: int, bias: np.ndarray) -> None:
        assert isinstance(weight, ReferenceLinear) and weight.bias is not None
        weight.bias[first : first + len(bias)] = paddle.to_tensor(bias)

    def stage(self, items: Sequence[StageItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
        return stage(items, stop, dtype or self.dtype)

    def apply_deltas(self, items: Sequence[DeltaItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
        return apply_deltas(self, items, stop, dtype or self.dtype)

    def copy_rows(self, target: PackedLinear, source: PackedLinear, first: int, last: int) -> None:
        assert isinstance(target, ReferenceLinear) and isinstance(source, ReferenceLinear)
        target.weight[first:last] = source.weight[first:last]
        if target.bias is not None and source.bias is not None:
            target.bias[first:last] = source.bias[first:last]

    def quantize(self, weights: Sequence[PackedLinear], stop: np.ndarray) -> None:
        assert self.dtype == "bfloat16"
        for weight in weights:
            assert isinstance(weight, ReferenceLinear)
            weight.quantized = True
            if not stop[0]:
                weight.int8 = paddle.to_tensor(quantized(weight.weight.numpy(), 127))

    def unpack_linear(self, weight: PackedLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        assert isinstance(weight, ReferenceLinear)
        rows = np.array(weight.weight[first:last].numpy())
        return (rows.view(np.uint32) >> 16).astype(np.uint16) if self.dtype == "bfloat16" else rows

    def unpack_bias(self, weight: PackedLinear) -> np.ndarray | None:
        assert isinstance(weight, ReferenceLinear)
        return None if weight.bias is None else np.array(weight.bias.numpy())

    def pack_lora(self, parts: Sequence[LoraPart | None], rows: Sequence[int], columns: int) -> ReferenceLora:
        firsts = np.cumsum([0, *rows])
        packed = [
            ReferencePart(int(firsts[i]), self._packed(part.a), self._packed(part.b), part.scaling)
            for i, part in enumerate(parts)
            if part is not None
        ]
        assert packed and len(parts) == len(rows)
        for part, n in zip(parts, rows, strict=True):
            assert part is None or (part.a.shape[1] == columns and part.b.shape == (n, len(part.a)))
        rank = sum(part.a.shape[0] for part in packed)
        nbytes = sum(4 * (part.a.size + part.b.size) for part in packed)
        return ReferenceLora(packed, sum(rows), columns, rank, nbytes)

    def gather_adapter(self, adapter: PackedAdapter) -> None:
        """Do nothing: these ops read an adapter from where it is."""

    def linear(self, x: paddle.Tensor, weight: PackedLinear) -> paddle.Tensor:
        return linear_in_tiles(x, weight, [])[: x.shape[0]]

    def mlp(self, x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear) -> paddle.Tensor:
        return gated_mlp(x, gate_up, down, Activation.SILU, [], [])

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
        blocks = [block for layer in layers for block in layer.blocks]
        kinds = ATTENTIONS if routing is None else (*ATTENTIONS, ExpertsBlock)
        picking = [block for block in blocks if isinstance(block, kinds)][-1]
        assert adapters is None or adapters.rows.shape == (residual.shape[0],)
        known = [] if adapters is None else adapters.adapters
        for i, layer in enumerate(layers):
            for j, block in enumerate(layer.blocks):
                picked = rows if block is picking else None
                if isinstance(block, ExpertsBlock):
                    residual = self._experts_block(residual, block, picked, routing)
                    continue
                of_linears = list(zip(*(adapter.layers[i][j] for adapter in known), strict=True))
                of_linears = of_linears or [()] * len(block.linears)
                inner = [lora_rows(adapters, loras) for loras in of_linears[:-1]]
                if picked is not None and adapters is not None:
                    adapters = adapters._replace(rows=adapters.rows[picked])
                last = lora_rows(adapters, of_linears[-1])
                if isinstance(block, MlpBlock):
                    residual = self._mlp_block(residual, block, inner[0], last)
                elif isinstance(block, AttentionBlock):
                    residual = self._attention_block(residual, block, cache, batch, picked, inner[0], last)
                else:
                    residual = self._latent_attention_block(residual, block, cache, batch, picked, inner, last)
            if between_layers is not None:
                between_layers()
        return residual

    def _attention_block(
        self,
        residual: paddle.Tensor,
        block: AttentionBlock,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray | None,
        qkv_loras: LoraRows,
        o_loras: LoraRows,
    ) -> paddle.Tensor:
        tokens = residual.shape[0]
        normed = self.rms_norm(residual, block.norm, block.norm_eps)
        qkv = linear_in_tiles(normed, block.qkv, qkv_loras)[:tokens]
        residual, attended = _picked(rows, residual, self.attention(qkv, cache, batch, block.attention))
        if len(residual) == 0:
            return residual
        return residual + self._output(linear_in_tiles(attended, block.o, o_loras)[: len(residual)], block)

    def _latent_attention_block(
        self,
        residual: paddle.Tensor,
        block: LatentAttentionBlock,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray | None,
        inner_loras: Sequence[LoraRows],
        o_loras: LoraRows,
    ) -> paddle.Tensor:
        tokens, spec, kv_loras = len(residual), block.attention, inner_loras[0]
        heads, latent, plain = spec.num_heads, block.kv_b.in_features, block.absorbed.in_features
        value = block.kv_b.out_features // heads - plain
        x = self.rms_norm(residual, block.norm, block.norm_eps)
        c, r = paddle.split(linear_in_tiles(x, block.kv_a, kv_loras)[:tokens], [latent, spec.rotary_dim], axis=1)
        key = paddle.concat([r, self.rms_norm(c, block.kv_norm, spec.norm_eps)], axis=1)
        if block.q_a is not None and block.q_norm is not None:
            x = self.rms_norm(linear_in_tiles(x, block.q_a, inner_loras[1])[:tokens], block.q_norm, spec.norm_eps)
        q = linear_in_tiles(x, block.q, inner_loras[-1])[:tokens].reshape([tokens, heads, plain + spec.rotary_dim])
        p, s = paddle.split(q, [plain, spec.rotary_dim], axis=2)
        query = paddle.concat([s, head_products(p, block.absorbed, 0, latent)], axis=2)
        qk = paddle.concat([query.reshape([tokens, heads * spec.head_dim]), key], axis=1)
        residual, attended = _picked(rows, residual, self.attention(qk, cache, batch, spec))
        if len(residual) == 0:
            return residual
        latents = attended.reshape([len(residual), heads, spec.head_dim])[:, :, spec.rotary_dim :]
        values = head_products(latents, block.kv_b, plain, value).reshape([len(residual), heads * value])
        return residual + linear_in_tiles(values, block.o, o_loras)[: len(residual)]

    def _mlp_block(
        self, residual: paddle.Tensor, block: MlpBlock, inner_loras: LoraRows, down_loras: LoraRows
    ) -> paddle.Tensor:
        if len(residual) == 0:
            return residual
        normed = self.rms_norm(residual, block.norm, block.norm_eps)
        found = gated_mlp(normed, block.gate_up, block.down, block.activation, inner_loras, down_loras)
        return residual + self._output(found, block)

    def _experts_block(
        self, residual: paddle.Tensor, block: ExpertsBlock, rows: np.ndarray | None, routing: Routing | None
    ) -> paddle.Tensor:
        if len(residual) == 0:
            return residual
        spec, normed = block.routing, self.rms_norm(residual, block.norm, block.norm_eps)
        if routing is None:
            return residual + mixture(normed, block, np.zeros((len(residual), spec.top_k), np.uint16), forced=False)
        found = residual + mixture(normed, block, routing.experts[:, spec.place], routing.forced)
        return found if rows is None else paddle.index_select(found, paddle.to_tensor(rows))

    def _output(self, x: paddle.Tensor, block: AttentionBlock | MlpBlock) -> paddle.Tensor:
        """Return what a block with this result adds to the residual."""
        return x if block.post_norm is None else self.rms_norm(x, block.post_norm, block.norm_eps)

    def logits(
        self,
        x: paddle.Tensor,
        norm: paddle.Tensor,
        eps: float,
        head: PackedLinear,
        adapters: AdapterRows | None = None,
    ) -> paddle.Tensor:
        known = [] if adapters is None else adapters.adapters
        loras = lora_rows(adapters, [adapter.lm_head for adapter in known])
        return linear_in_tiles(self.rms_norm(x, norm, eps), head, loras)[: x.shape[0]]

    def embedding(self, token_ids: np.ndarray, weight: PackedLinear) -> paddle.Tensor:
        assert isinstance(weight, ReferenceLinear)
        return paddle.index_select(weight.weight, paddle.to_tensor(token_ids))

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last axis: x [..., H]."""
        # The square root of numpy is rounded correctly. Paddle's is approximate, with other bits at an array's end.
        norm = np.sqrt((x * x).mean(-1, keepdim=True).numpy() + np.float32(eps))
        return x / paddle.to_tensor(norm) * weight

    def new_kv_cache(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        keys_only: bool = False,
    ) -> ReferenceKVCache:
        shape, parts = [num_blocks * block_size, num_kv_heads, head_dim], 1 if keys_only else 2
        tensors = [[paddle.zeros(shape, "float32") for _ in range(layers)] for _ in range(parts)]
        nbytes = parts * layers * 4 * int(np.prod(shape))
        return ReferenceKVCache(tensors[0], tensors[-1], num_blocks, block_size, keys_only, nbytes)

    def copy_blocks(self, cache: KVCache, sources: list[int], targets: list[int]) -> None:
        assert isinstance(cache, ReferenceKVCache)
        within = np.arange(cache.block_size)
        # In order: the target of one pair may be the source of a later one.
        for source, target in zip(sources, targets, strict=True):
            old = paddle.to_tensor(source * cache.block_size + within)
            new = paddle.to_tensor(target * cache.block_size + within)
            for layer in cache.keys if cache.keys_only else (*cache.keys, *cache.values):
                paddle.scatter_(layer, new, paddle.index_select(layer, old))

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        assert isinstance(cache, ReferenceKVCache)
        tokens, dim = qkv.shape[0], spec.head_dim
        of_heads, heads = qkv.reshape([tokens, -1, dim]), [spec.num_heads, spec.num_kv_heads]
        if cache.keys_only:
            q, k = paddle.split(of_heads, heads, axis=1)
        else:
            q, k, v = paddle.split(of_heads, [*heads, spec.num_kv_heads], axis=1)
        if spec.q_norm is not None:
            q = self.rms_norm(q, spec.q_norm, spec.norm_eps)
        if spec.k_norm is not None:
            k = self.rms_norm(k, spec.k_norm, spec.norm_eps)
        positions = paddle.to_tensor(batch.positions)
        cos = paddle.index_select(spec.rope_cos, positions).unsqueeze(1)
        sin = paddle.index_select(spec.rope_sin, positions).unsqueeze(1)
        q, k = (rotate(one, cos, sin, bool(spec.interleaved)) for one in (q, k))
        if cache.keys_only:
            v = k
        sequence = np.repeat(np.arange(len(batch.starts)), np.diff(batch.cu_tokens))
        slots = paddle.to_tensor(
            slots_of(batch.block_tables[sequence], batch.positions[:, None], cache.block_size)[:, 0]
        )
        keys, values = cache.keys[spec.layer], cache.values[spec.layer]
        k, v = contained(self._rounded_tensor(k), self._rounded_tensor(v))
        paddle.scatter_(keys, slots, k)
        if not cache.keys_only:
            paddle.scatter_(values, slots, v)
        return attend(q, keys, values, batch, cache.block_size, spec)

    def free_scratch(self) -> None:
        """Do nothing: these ops keep no memory between calls."""

    def sample(
        self,
        logits: paddle.Tensor,
        batch: SampleBatch,
        cutoff: Cutoff | None = None,
        masks: TokenMasks | None = None,
    ) -> np.ndarray:
        drawn = np.empty(logits.shape[0], np.int32)
        values = logits.numpy()
        if masks is not None:
            values = values.copy()
            masks.apply(values)
        for i, row in enumerate(values):
            drawn[i], kept = draw(row, batch, i)
            if cutoff is not None:
                cutoff.logits[i], cutoff.ids[i] = kept
        return drawn

    def logprobs(self, logits: paddle.Tensor, batch: LogprobBatch) -> TokenLogprobs:
        rows, (count, _), top = logits.numpy(), logits.shape, batch.top
        chosen, ranks = np.full(count, np.nan, np.float32), np.zeros(count, np.int32)
        best, ids = np.full((count, top), -np.inf, np.float32), np.zeros((count, top), np.int32)
        others = np.full(0 if batch.other_ids is None else len(batch.other_ids), -np.inf, np.float32)
        for i, row in enumerate(rows):
            if not np.isfinite(row.max()):
                continue
            values = scores(row, batch, i)
            chosen[i], ranks[i] = values[batch.token_ids[i]], 1 + (row > row[batch.token_ids[i]]).sum()
            if batch.other_ids is not None and batch.other_ends is not None:
                here = slice(batch.other_ends[i - 1] if i else 0, batch.other_ends[i])
                asked = batch.other_ids[here]
                others[here] = np.where(np.isin(asked, inside(row, batch.cutoff, i)), values[asked], -np.inf)
            order = inside(row, batch.cutoff, i)
            order = order[np.argsort(-row[order], kind="stable")][:top]
            ids[i, : len(order)], best[i, : len(order)] = order, values[order]
        return TokenLogprobs(chosen, best, ids, ranks, others)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return round_to_bfloat16(values) if self.dtype == "bfloat16" else values

    def _packed(self, array: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(self._rounded(to_float32(array)))

    def _rounded_tensor(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.to_tensor(round_to_bfloat16(x.numpy())) if self.dtype == "bfloat16" else x


def _picked(rows: np.ndarray | None, *tensors: paddle.Tensor) -> list[paddle.Tensor]:
    """Return these rows of the tensors, or all of them."""
    if rows is None:
        return list(tensors)
    return [paddle.index_select(tensor, paddle.to_tensor(rows)) for tensor in tensors]
