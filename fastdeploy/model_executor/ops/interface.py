"""The operators that models use. ``reference`` (Paddle) and ``cpu`` (C++) implement them.

All activations are contiguous float32 Paddle tensors on the place of the ops. ``dtype`` ("float32" or "bfloat16") is
the type of the weights and of the KV cache. With bfloat16 the C++ ops round the input of a linear to bfloat16 and
accumulate in float32; the reference computes in float32 with weights that are rounded to bfloat16. AVX512_BF16 and
AMX take denormal numbers as 0 and flush denormal results to 0; the others compute with them.

A bfloat16 weight may have int8 values beside its own (``Ops.quantize``). Products with it use these, and its input is
rounded to integers of 16 bits, with a scale for each ``INT8_GROUP`` values of a row. The sum of a group is exact, so
such a linear gives the same bits at every instruction set.

For finite inputs every op gives a row the same bits, whatever other rows are in the batch and however a prompt is cut
into chunks: the order of every sum depends only on the position of the row and on constants of the op. A row that is
not finite changes later rows of its own sequence only: earlier rows, whose KV may be shared, and other sequences keep
their bits. The bits of the row that is not finite are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import paddle

from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks

INT8_GROUP = 64  # values of a column of weights, or of a row of inputs, that share a scale


class PackedLinear(Protocol):
    """A weight [out_features, in_features], with or without a bias, in a layout that the ops choose. Immutable.
    nbytes: with its int8 values. quantized: it has int8 values."""

    out_features: int
    in_features: int
    quantized: bool

    @property
    def nbytes(self) -> int: ...

    def transposed_heads(self, heads: int, rows: int) -> PackedLinear:
        """Return a new weight of the transposed heads. The weight is [heads * n, K]; that of each head is cut to its
        first ``rows`` and transposed: [heads * K, rows]. May run at the same time as all ops. Raises MemoryError."""


class KVCache(Protocol):
    """The KV blocks of all layers: num_blocks x block_size slots for keys and values [kv_heads, head_dim]. keys_only:
    the keys are the values, too, and only they are stored."""

    num_blocks: int
    block_size: int
    keys_only: bool
    nbytes: int


class AttentionBatch(NamedTuple):
    """The token rows of one step: R sequences, T rows in total. int32 numpy arrays, made once per step.

    cu_tokens [R+1]: sequence r owns token rows cu_tokens[r]:cu_tokens[r+1].
    starts [R]: position of the first of these rows, equal to the number of tokens of r that are in the cache already.
    block_tables [R, W]: block ids, padded with 0.
    positions [T]: absolute position of each row.
    """

    cu_tokens: np.ndarray
    starts: np.ndarray
    block_tables: np.ndarray
    positions: np.ndarray


class AttentionSpec(NamedTuple):
    """The attention of one layer. The first ``rotated`` dimensions of a head are rotated: all, or ``rotary_dim`` if it
    is not 0. rope_cos, rope_sin: float32 [max_model_len, rotated // 2]; dimension i is rotated with dimension
    i + rotated / 2, as in GPT-NeoX. q_norm, k_norm: weights [head_dim] of an RMSNorm of each head, or None; norm_eps is
    the epsilon of these two. interleaved: 1 if dimension 2i is rotated with dimension 2i + 1 instead, as in GPT-J; else
    0. window: how many tokens a token attends to, itself and those before it; 0: all. The cache has the keys of all
    tokens, but those outside the window are not read, except in the block of keys in which the window begins. sinks:
    float32 [num_heads], or None: the softmax of a head has one more score, this number, whose value is 0."""

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
    interleaved: int = 0
    window: int = 0
    rotary_dim: int = 0
    sinks: paddle.Tensor | None = None

    @property
    def rotated(self) -> int:
        """The number of dimensions that are rotated."""
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """The attention of one layer: residual += o(attention(qkv(rms_norm(residual)))). qkv packs q, k and v. norm:
    float32 [hidden_size]. With post_norm, float32 [hidden_size], what is added is rms_norm(o(...)) by this weight."""

    norm: paddle.Tensor
    norm_eps: float
    qkv: PackedLinear
    attention: AttentionSpec
    o: PackedLinear
    post_norm: paddle.Tensor | None = None

    def __post_init__(self) -> None:
        [hidden], spec = self.norm.shape, self.attention
        assert self.post_norm is None or self.post_norm.shape == [hidden]
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        assert (self.qkv.in_features, self.qkv.out_features) == (hidden, heads + 2 * kv_heads)
        assert (self.o.in_features, self.o.out_features) == (heads, hidden)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Linears that an adapter may change, in the order in which they are computed."""
        return self.qkv, self.o


class Activation(IntEnum):
    """The function of gate and up of an MLP. SILU: silu(gate) * up. GELU_TANH: gelu(gate) * up, with the approximation
    of GELU with tanh. SWIGLU_CLAMPED: with gate = min(gate, SWIGLU_LIMIT) and up cut to +- SWIGLU_LIMIT, gate *
    sigmoid(SWIGLU_ALPHA * gate) * (up + 1), as GptOssExperts of transformers computes it. kernels.h has the same
    order."""

    SILU = 0
    GELU_TANH = 1
    SWIGLU_CLAMPED = 2


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # simd.h has the same


@dataclass(frozen=True, eq=False)
class MlpBlock:
    """The MLP of one layer: residual += down(activation(gate(x), up(x))) with x = rms_norm(residual). gate_up packs
    gate and up. norm, post_norm: see ``AttentionBlock``."""

    norm: paddle.Tensor
    norm_eps: float
    gate_up: PackedLinear
    down: PackedLinear
    activation: Activation = Activation.SILU
    post_norm: paddle.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.post_norm is None or self.post_norm.shape == self.norm.shape
        assert [self.gate_up.in_features] == [self.down.out_features] == self.norm.shape
        assert self.gate_up.out_features == 2 * self.down.in_features

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """See ``AttentionBlock.linears``."""
        return self.gate_up, self.down


class RouterScore(IntEnum):
    """The score of an expert for a row, from the router's logits. SOFTMAX: over all experts. SIGMOID: of the expert's
    logit. SOFTMAX_OF_CHOSEN: the logit itself for the choice, and then the softmax over those that are chosen. router.h
    has the same order."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


class RouterSpec(NamedTuple):
    """How a router chooses ``top_k`` experts of a row, and how much each of them counts.

    place: the number of the layer among the layers with experts (see ``Routing``). An expert's rank is its score, plus
    its ``bias`` (float32 [experts]) if there is one. The experts with the highest ranks are chosen, best first; of
    equal ranks, the lower id is first. With ``groups`` above 1, neighbouring experts form groups of equal size, and
    only experts of the ``top_groups`` best groups are chosen: those with the highest sums of their two highest ranks,
    the lower group first. Weights are the scores, without the bias; normalize: 1 if they are divided by their sum, or
    by ``norm_min`` if that is larger; scale: they are multiplied by it then."""

    place: int
    top_k: int
    score: RouterScore
    groups: int = 1
    top_groups: int = 1
    normalize: int = 0
    scale: float = 1.0
    bias: paddle.Tensor | None = None
    norm_min: float = 1e-20


class Routing(NamedTuple):
    """The experts of each row of a batch. experts: uint16 [T, layers with experts, top_k], best first. forced: False:
    the step writes them. True: it computes with them, in this order, and a row whose first expert is OWN_CHOICE chooses
    for itself, in that layer."""

    experts: np.ndarray
    forced: bool = False


OWN_CHOICE = 0xFFFF
MAX_GROUPS = 64


@dataclass(frozen=True, eq=False)
class ExpertsBlock:
    """A mixture of experts: residual += sum of weight * expert(x) over the chosen experts, in the order of the choice,
    + shared(x), with x = rms_norm(residual). The weights and the choice are those of ``routing`` for the logits
    router(x). Each expert is the MLP of an ``MlpBlock``.

    router: [experts, hidden_size]. gate_up: [experts * 2 * inner, hidden_size] packs gate, then up of the first
    expert, then of the next one; down: [experts * hidden_size, inner]. inner and hidden_size are multiples of 16.
    shared_gate_up, shared_down: an MLP for all rows, or None."""

    norm: paddle.Tensor
    norm_eps: float
    router: PackedLinear
    routing: RouterSpec
    gate_up: PackedLinear
    down: PackedLinear
    activation: Activation = Activation.SILU
    shared_gate_up: PackedLinear | None = None
    shared_down: PackedLinear | None = None

    def __post_init__(self) -> None:
        [hidden], spec, inner = self.norm.shape, self.routing, self.down.in_features
        assert self.router.in_features == self.gate_up.in_features == hidden
        assert hidden % 16 == inner % 16 == 0 and self.experts < OWN_CHOICE
        assert self.gate_up.out_features == 2 * inner * self.experts
        assert self.down.out_features == hidden * self.experts
        assert self.experts % spec.groups == 0 and spec.top_groups <= spec.groups <= MAX_GROUPS
        assert 0 < spec.top_k <= self.experts // spec.groups * spec.top_groups
        assert spec.bias is None or spec.bias.shape == [self.experts]
        assert (self.shared_gate_up is None) == (self.shared_down is None)
        if self.shared_gate_up is not None and self.shared_down is not None:
            assert self.shared_gate_up.in_features == self.shared_down.out_features == hidden
            assert self.shared_gate_up.out_features == 2 * self.shared_down.in_features

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.router.out_features

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """See ``AttentionBlock.linears``. Adapters change none of them."""
        return ()


@dataclass(frozen=True, eq=False)
class LatentAttentionBlock:
    """Multi-head latent attention (DeepSeek-V2), with absorbed weights. The cache has one key for all heads, [rotary |
    latent], and no values (``KVCache.keys_only``): the latent part is the value. With x = rms_norm(residual), R =
    attention.rotary_dim and L = kv_b.in_features:

      [c | r] = kv_a(x)                                    L and R wide; the key is [rotate(r) | rms_norm(c, kv_norm)]
      [p | s] of each head = q(rms_norm(q_a(x), q_norm))   P and R wide; q(x) if q_a is None
      query of a head      = [rotate(s) | p @ K]           K [P, L], V [value, L]: the rows of the head in kv_b
      output of a head     = latent @ V.T                  latent: the last L numbers of the attention's result
      residual            += o(outputs of all heads)

    This is attention over keys [rotate(r) | K c] and values V c of each head, without making them. The epsilon of
    q_norm and kv_norm is attention.norm_eps. absorbed [heads * L, P] packs K.T of each head, by
    ``kv_b.transposed_heads``. R, L, P and value are multiples of 16. No linear has int8 values but q, kv_a, q_a and
    o."""

    norm: paddle.Tensor
    norm_eps: float
    q: PackedLinear
    kv_a: PackedLinear
    kv_norm: paddle.Tensor
    kv_b: PackedLinear
    absorbed: PackedLinear
    attention: AttentionSpec
    o: PackedLinear
    q_a: PackedLinear | None = None
    q_norm: paddle.Tensor | None = None

    def __post_init__(self) -> None:
        [hidden], spec = self.norm.shape, self.attention
        heads, latent, plain = spec.num_heads, self.kv_b.in_features, self.absorbed.in_features
        value, more = divmod(self.kv_b.out_features, heads)
        value -= plain
        assert more == latent % 16 == plain % 16 == value % 16 == spec.rotary_dim % 16 == 0 and spec.num_kv_heads == 1
        assert spec.head_dim == spec.rotary_dim + latent and spec.q_norm is spec.k_norm is None
        assert (self.kv_a.in_features, self.kv_a.out_features) == (hidden, spec.head_dim)
        assert self.kv_norm.shape == [latent] and self.absorbed.out_features == heads * latent
        assert (self.o.in_features, self.o.out_features) == (heads * value, hidden)
        assert self.q.out_features == heads * (plain + spec.rotary_dim)
        assert self.q.in_features == (hidden if self.q_a is None else self.q_a.out_features)
        if self.q_a is not None:
            assert self.q_a.in_features == hidden and self.q_norm is not None
            assert self.q_norm.shape == [self.q_a.out_features]

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """See ``AttentionBlock.linears``."""
        return self.kv_a, *(() if self.q_a is None else (self.q_a,)), self.q, self.o


Block: TypeAlias = AttentionBlock | MlpBlock | ExpertsBlock | LatentAttentionBlock
BLOCKS = (AttentionBlock, MlpBlock, ExpertsBlock, LatentAttentionBlock)  # layer.cc has the same order
ATTENTIONS = (AttentionBlock, LatentAttentionBlock)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The blocks of one layer, in the order in which they are computed.

    Layers are compared by identity and can be weakly referenced: ops keep what they prepared for a layer as long as the
    layer lives, without keeping its weights alive."""

    blocks: tuple[Block, ...]


class LoraPart(NamedTuple):
    """The adapter of one projection: x @ a.T @ b.T * scaling is added to x @ W.T. a [r, in_features], b [out_features,
    r]: both float32, or both bfloat16 as uint16 bits, and contiguous."""

    a: np.ndarray
    b: np.ndarray
    scaling: float


class PackedLora(Protocol):
    """The adapter of one packed linear, in a layout that the ops choose. Immutable. rank: the sum over its parts."""

    out_features: int
    in_features: int
    rank: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """One adapter over all layers. Immutable. Compared by identity, like a DecoderLayer.

    layers: for each layer, for each of its blocks, the adapters of ``linears`` of the block; None where the adapter
    has no part."""

    layers: tuple[tuple[tuple[PackedLora | None, ...], ...], ...]
    lm_head: PackedLora | None
    nbytes: int


class AdapterRows(NamedTuple):
    """The adapters of the rows of a batch. rows: int32 [T], the index in ``adapters`` for each row, or -1 for a row
    without an adapter. The rows of one adapter are adjacent. An adapter changes no bit of rows that do not use it, and
    a row has the same bits whatever other adapters are in the batch."""

    adapters: Sequence[PackedAdapter]
    rows: np.ndarray


class Region(NamedTuple):
    """The place for the values of one checkpoint tensor, [rows, columns]. linear: rows [first_row, first_row + rows) of
    this weight. vector: this array, float32 [rows * columns], of a norm or a bias; its values are rounded to the dtype
    of the ops and widened again. With neither, the values are only checked.

    experts: 0, or the tensor of a linear is [experts, columns, rows / experts]: the matrix of each expert, transposed.
    interleaved: 1 if the rows of an expert, half of them gate and half up, take turns in the tensor: gate 0, up 0, gate
    1, ..."""

    rows: int
    columns: int
    linear: PackedLinear | None = None
    first_row: int = 0
    vector: np.ndarray | None = None
    experts: int = 0
    interleaved: int = 0


class View(NamedTuple):
    """Where the values of a tensor [rows, columns] lie in a stored one whose rows have ``stride`` values: (row, column)
    is ``column * stride + row // run * step + row % run`` values after (0, 0)."""

    stride: int
    run: int
    step: int


class StageItem(NamedTuple):
    """The values to read into a region. fd: an open file, read at ``offset`` (bytes). memory: or this array of
    uint8, of which ``offset`` is the first byte. dtype: of the source, "F32", "BF16" or "F16"; it is rounded to
    nearest even. view: None = the values lie in C order; else only a region of a linear without experts is allowed."""

    region: Region
    dtype: str
    offset: int
    fd: int = -1
    memory: np.ndarray | None = None
    view: View | None = None


class DeltaItem(NamedTuple):
    """A change of a region that holds the base. payload: an overwrite as uint8, see core/delta_format.py. Nobody may
    write to the payload meanwhile: it is checked before it is applied."""

    region: Region
    payload: np.ndarray


class Problem(StrEnum):
    """The reason why values were refused. TOO_LARGE: finite in the source, but not in the dtype of the ops. STOPPED:
    ``stop`` was set. MALFORMED: a payload of the wrong size, or an index out of order or out of range."""

    NOT_FINITE = "not_finite"
    TOO_LARGE = "too_large"
    CUT_SHORT = "cut_short"
    READ_ERROR = "read_error"
    MALFORMED = "malformed"
    STOPPED = "stopped"


class StageResult(NamedTuple):
    """The result for one item. fingerprint: of the values; for a DeltaItem, what to add to the fingerprint of the base.
    problem: None = the region has the values. Otherwise its content is undefined. errno: of a READ_ERROR."""

    fingerprint: Fingerprint
    problem: Problem | None = None
    errno: int = 0


class Ops(Protocol):
    """The operators of one place and dtype. Weights and caches of one Ops object are used with that object only."""

    name: str
    dtype: str

    def pack_linear(self, parts: list[np.ndarray], bias: list[np.ndarray] | None = None) -> PackedLinear:
        """Pack weights [n_i, K], stacked along the output, and their biases, float32 [n_i].

        parts: float32, or bfloat16 as uint16 bits (the layout of safetensors), all of one type. A type other than
        ``self.dtype`` is converted, rounding to nearest even. The arrays may be freed afterwards. Releases the GIL, and
        may run at the same time as all other ops."""

    def new_linear(self, rows: int, columns: int, bias: bool) -> PackedLinear:
        """Allocate a weight for ``stage`` to write, of zeros. Raises MemoryError."""

    def set_bias(self, weight: PackedLinear, first: int, bias: np.ndarray) -> None:
        """Set the bias of the rows from ``first`` on: float32, contiguous."""

    def stage(self, items: Sequence[StageItem], stop: np.ndarray) -> list[StageResult]:
        """Read, check, convert, pack and fingerprint tensors in one pass, on all cores. The regions do not overlap, and
        no step uses them. Each byte of a source is read once. stop: int32 [1]; another thread may set it to 1, and the
        rest is given up then. Releases the GIL. Runs beside all other ops, and gives way to them: its threads have a
        low priority. Returns the results in the order of the items."""

    def apply_deltas(self, items: Sequence[DeltaItem], stop: np.ndarray) -> list[StageResult]:
        """Change values of regions, in time proportional to the payloads. Otherwise as ``stage``. An item that is
        MALFORMED or not finite may be applied in part. A region with neither a linear nor a vector is not allowed."""

    def copy_rows(self, target: PackedLinear, source: PackedLinear, first: int, last: int) -> None:
        """Copy rows [first, last) and their bias to the same rows of a weight of the same shape, on all cores, as
        ``stage`` does. Releases the GIL, and may run at the same time as all other ops that do not use ``target``."""

    def quantize(self, weights: Sequence[PackedLinear], stop: np.ndarray) -> None:
        """Make the int8 values of bfloat16 weights, or make them anew after a weight was changed, on all cores, as
        ``stage`` does. ``linear``, ``mlp``, ``logits`` and ``decoder_layers`` use them from then on; all other ops use
        the weight's own values. Each INT8_GROUP values of an output are scale * q, with q from -127 to 127, rounded to
        nearest even, and scale = largest magnitude / 127. stop: see ``stage``; the int8 values are undefined then.
        Releases the GIL, and may run at the same time as all other ops that do not use these weights. Raises
        MemoryError."""

    def unpack_linear(self, weight: PackedLinear, first: int = 0, last: int | None = None) -> np.ndarray:
        """Copy rows [first, last) of a packed weight in ``self.dtype`` (bfloat16 as uint16 bits). Packing the copy
        gives the same bits. May run at the same time as all other ops."""

    def unpack_bias(self, weight: PackedLinear) -> np.ndarray | None:
        """Copy the bias, float32 [out_features]; None if the weight has no bias."""

    def pack_lora(self, parts: Sequence[LoraPart | None], rows: Sequence[int], columns: int) -> PackedLora:
        """Pack the adapter of a linear that stacks projections of ``rows`` outputs each over ``columns`` inputs. parts:
        one entry for each projection; None where it has no adapter. At least one is given. A type other than
        ``self.dtype`` is converted as in ``pack_linear``. May run at the same time as all other ops."""

    def gather_adapter(self, adapter: PackedAdapter) -> None:
        """Move an adapter to one piece of memory, so that steps read it fast. Call it once, before the first use of the
        adapter and of its parts; it may run at the same time as all other ops. Raises MemoryError; then the adapter is
        as it was."""

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
        """Compute all blocks of these layers on residual [T, H], whose memory may be overwritten. Returns the residual.

        rows (int64, ascending): only these rows are returned, [len(rows), H]. The cache is complete all the same: rows
        are dropped in the last attention block, after the keys and values of all tokens are written.
        between_layers: called after each layer, the last one included. If it raises, the error is passed on and the
        later layers are not computed. adapters: of the T rows; None if no row has one. routing: of the T rows; not
        together with ``rows``, because the experts of the last layer are those of all rows.
        """

    def logits(
        self,
        x: paddle.Tensor,
        norm: paddle.Tensor,
        eps: float,
        head: PackedLinear,
        adapters: AdapterRows | None = None,
    ) -> paddle.Tensor:
        """Return rms_norm(x, norm) @ head.T: x [M, H] -> float32 [M, V]. The next call may overwrite the result.
        adapters: of the M rows; only their lm_head counts."""

    def linear(self, x: paddle.Tensor, weight: PackedLinear) -> paddle.Tensor:
        """Return x @ W.T + bias: x [M, K] -> [M, N]. For tests and benchmarks."""

    def mlp(self, x: paddle.Tensor, gate_up: PackedLinear, down: PackedLinear) -> paddle.Tensor:
        """Return (silu(x @ gate.T) * (x @ up.T)) @ down.T: x [M, K] -> [M, N]. gate_up packs gate, then up, [2I, K];
        down is [N, I]. For tests and benchmarks."""

    def embedding(self, token_ids: np.ndarray, weight: PackedLinear) -> paddle.Tensor:
        """Return rows token_ids (int32 [T]) of a packed weight as float32 [T, K], so that a tied embedding is in memory
        once."""

    def new_kv_cache(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        keys_only: bool = False,
    ) -> KVCache:
        """Allocate a cache for this many layers and blocks. Raises MemoryError."""

    def copy_blocks(self, cache: KVCache, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks in every layer, pair by pair in order."""

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, batch: AttentionBatch, spec: AttentionSpec
    ) -> paddle.Tensor:
        """Normalise q and k if the spec has norms, rotate them, write k and v into the cache and attend causally over
        the cache. qkv is q, then k, then v: [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads *
        head_dim]; with a cache of keys only, q, then k. For tests and benchmarks."""

    def free_scratch(self) -> None:
        """Free the memory that is kept between calls only for speed, that of ``logits`` included. No other op may be
        running."""

    def sample(
        self,
        logits: paddle.Tensor,
        batch: SampleBatch,
        cutoff: Cutoff | None = None,
        masks: TokenMasks | None = None,
    ) -> np.ndarray:
        """Draw one token id per row: logits [S, V] -> int32 [S]. An id that ``masks`` does not allow counts as one with
        the logit -inf.

        Probabilities are softmax(logits / temperature). Of these, keep the top_k best; then the smallest set of best
        tokens whose sum reaches top_p, after the rest is renormalised; then those of at least min_p times the best.
        The draw inverts the cumulative sum, in the order of token ids, at ``uniform``. The id is -1 for a row that is
        not finite: one with a NaN or +inf, or with -inf for every token.

        cutoff: is overwritten with what was kept."""

    def logprobs(self, logits: paddle.Tensor, batch: LogprobBatch) -> TokenLogprobs:
        """Return the log softmax of logits [S, V], over the tokens up to the cutoff and at the temperature."""
