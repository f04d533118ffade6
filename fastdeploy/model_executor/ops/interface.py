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
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import paddle

from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.model_executor.ops.blocks import AttentionSpec, DecoderLayer, PackedLinear
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks

INT8_GROUP = 64  # values of a column of weights, or of a row of inputs, that share a scale


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


class Routing(NamedTuple):
    """The experts of each row of a batch. experts: uint16 [T, layers with experts, top_k], best first. forced: False:
    the step writes them. True: it computes with them, in this order."""

    experts: np.ndarray
    forced: bool = False


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

    def stage(self, items: Sequence[StageItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
        """Read, check, convert, pack and fingerprint tensors in one pass, on all cores. The regions do not overlap, and
        no step uses them. Each byte of a source is read once. stop: int32 [1]; another thread may set it to 1, and the
        rest is given up then. Releases the GIL. Runs beside all other ops, and gives way to them: its threads have a
        low priority. dtype: of vectors, "float32" or ""; "": that of the ops. Returns the results in the order of the
        items."""

    def apply_deltas(self, items: Sequence[DeltaItem], stop: np.ndarray, dtype: str = "") -> list[StageResult]:
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

        rows (int64, ascending): only these rows are returned, [len(rows), H]. The cache and ``routing`` are complete
        all the same: rows are dropped in the last attention block, after the keys and values of all tokens are written,
        or, if the last block has experts and there is a routing, in that block, after it chose for all rows.
        between_layers: called after each layer, the last one included. If it raises, the error is passed on and the
        later layers are not computed. adapters: of the T rows; None if no row has one. routing: of the T rows.
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
