"""The blocks that a layer is made of, each with its formula. A model file names them, ``interface.Ops`` computes
them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

import paddle


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


MAX_EXPERTS = 1 << 16  # of a layer: their ids are uint16
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
        assert hidden % 16 == inner % 16 == 0 and self.experts <= MAX_EXPERTS
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
