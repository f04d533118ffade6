"""The operator set that model code is written against; ``reference`` (Paddle) and ``cpu`` (C++) implement it.

All activations are contiguous float32 Paddle tensors on the ops' place. ``dtype`` ("float32" or "bfloat16") is that
of the weights and of the KV cache. With bfloat16 the C++ ops round the left operand of a linear to bfloat16 and
accumulate in float32; the reference computes in float32 on weights rounded to bfloat16.

For finite inputs every op gives a row the same bits, for every batch around it and every cut of a prompt into chunks:
sums run in an order fixed by the row's own position and the op's constants alone. A row that is not finite spoils the
rows behind it in its own sequence and no others: neither those before it, whose KV may be shared, nor those of other
sequences. Its own bits are not promised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import paddle


class PackedLinear(Protocol):
    """A weight [out_features, in_features] (and bias) in whatever layout the ops like; immutable once made."""

    out_features: int
    in_features: int
    nbytes: int


class KVCache(Protocol):
    """KV blocks of all layers: num_blocks x block_size slots, kv_heads x head_dim keys and values each."""

    num_blocks: int
    block_size: int
    nbytes: int


class AttentionBatch(NamedTuple):
    """Shape of one step. R sequences, T tokens in all; int32 numpy arrays, made once a step.

    cu_tokens [R+1]: sequence r owns token rows cu_tokens[r]:cu_tokens[r+1].
    starts [R]: position of the first of these rows, i.e. how many tokens of the sequence are in the cache already.
    block_tables [R, W]: block ids, padded with 0.
    positions [T]: absolute position of each row.
    """

    cu_tokens: np.ndarray
    starts: np.ndarray
    block_tables: np.ndarray
    positions: np.ndarray


class AttentionSpec(NamedTuple):
    """One layer's attention. rope: float32 cos and sin tables [max_model_len, head_dim // 2], rotate-half convention
    (GPT-NeoX: pairs are (i, i + head_dim/2)). q_norm, k_norm: per-head RMSNorm weights [head_dim] (Qwen3) or None."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope_cos: paddle.Tensor
    rope_sin: paddle.Tensor
    q_norm: paddle.Tensor | None
    k_norm: paddle.Tensor | None
    norm_eps: float


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights. qkv packs q, k, v; gate_up packs gate, up. Norm weights are float32 [hidden_size].

    Compared by identity, and weakly referenceable: ops keep what they prepared for a layer as long as it lives, without
    keeping its weights."""

    input_norm: paddle.Tensor
    qkv: PackedLinear
    attention: AttentionSpec
    o: PackedLinear
    post_norm: paddle.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class SampleBatch(NamedTuple):
    """Per-row sampling parameters, numpy arrays of length S. temperature 0 = argmax (lowest id wins a tie).
    top_k 0 = off; top_p 1 = off; min_p 0 = off. uniform: float64 in [0, 1), the row's random number."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray


class Ops(Protocol):
    name: str
    dtype: str

    def pack_linear(self, parts: list[np.ndarray], bias: list[np.ndarray] | None = None) -> PackedLinear:
        """Pack weights [n_i, K] stacked along the output: float32, or bfloat16 as uint16 bits (safetensors' own
        layout). parts of one call have one dtype, which need not be ``self.dtype``: they are converted (round to
        nearest even). The arrays may be freed afterwards. bias: float32 [n_i] each. Releases the GIL, and may run
        beside all other ops."""

    def unpack_linear(self, weight: PackedLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        """A copy of rows [first, last) of a packed weight, in ``self.dtype`` (bfloat16 as uint16 bits): packing them
        again gives the same bits. May run beside all other ops."""

    def unpack_bias(self, weight: PackedLinear) -> np.ndarray | None:
        """A copy of its bias, float32 [out_features], or None if it has none."""

    def decoder_layers(
        self,
        residual: paddle.Tensor,
        layers: Sequence[DecoderLayer],
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray | None = None,
        between_layers: Callable[[], None] | None = None,
    ) -> paddle.Tensor:
        """residual [T, H], which it may overwrite, through these layers. In each attention and MLP are added, of the
        RMSNorm of what they join:

            residual += o(attention(qkv(rms_norm(residual, input_norm))))
            residual += mlp(rms_norm(residual, post_norm))

        rows (int64, ascending): return only these, [len(rows), H]; the cache is completed all the same. Norms take
        their epsilon from ``attention.norm_eps``. ``between_layers`` is called after each layer, the last one included;
        what it raises goes through, and the later layers are not computed."""

    def logits(self, x: paddle.Tensor, norm: paddle.Tensor, eps: float, head: PackedLinear) -> paddle.Tensor:
        """x [M, H] -> rms_norm(x, norm) @ head.T, float32 [M, V]: in memory that the next call may overwrite."""

    def linear(self, x: paddle.Tensor, weight: PackedLinear) -> paddle.Tensor:
        """x [M, K] -> [M, N] = x @ W.T + bias, float32. A part of a layer, by itself."""

    def mlp(self, x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear) -> paddle.Tensor:
        """gate_up packs gate then up, [2I, K]; down is [N, I]: x [M, K] -> (silu(x @ gate.T) * (x @ up.T)) @ down.T,
        [M, N]. A part of a layer, by itself."""

    def embedding(self, token_ids: np.ndarray, weight: PackedLinear) -> paddle.Tensor:
        """Rows token_ids (int32 [T]) of the weight, as float32 [T, K]; so tied embeddings are held once."""

    def new_kv_cache(
        self, layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCache: ...

    def copy_blocks(self, cache: KVCache, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks in every layer, pair by pair."""

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        """qkv [T, (num_heads + 2*num_kv_heads) * head_dim] (q, then k, then v): norm q and k if the spec says so,
        rotate them, write k and v into the cache, and attend causally over the cache. -> [T, num_heads * head_dim].
        A part of a layer, by itself."""

    def free_scratch(self) -> None:
        """Give back what is kept between calls for speed alone, ``logits``' memory included. No other op may be
        running."""

    def sample(self, logits: paddle.Tensor, batch: SampleBatch) -> np.ndarray:
        """logits [S, V] -> token ids int32 [S]. Probabilities are softmax(logits / temperature); keep the top_k best,
        then of these the smallest set of best tokens whose mass reaches top_p (renormalised after top_k), and none
        below min_p * best; draw by inverting the cumulative sum, in token id order, at ``uniform``. The id is -1 for a
        row that is not finite: one with a NaN or +inf, or with nothing but -inf."""

    def logprobs(
        self, logits: paddle.Tensor, token_ids: np.ndarray, top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log softmax of logits: (chosen [S], top values [S, top], top ids [S, top]), best first. chosen is NaN for a
        row that is not finite (see ``sample``), and only there; its top values are -inf."""
