"""Faults of a sync: what a trainer's tensors become at an engine. A table of ways, each with classes of tensors.

A fault is made of the trainer's new tensors and those of one update before, both float32 by name, with the values of
the serving dtype. Its kind is a way in one class of tensors, such as "transposed: q_proj".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy.core.serving_dtype import in_dtype, widen
from fastdeploy.rl.check_sync.own_run import with_error

Tensors = dict[str, np.ndarray]
Change = Callable[["Place"], np.ndarray]

CLASSES = {
    "embedding": r"embed_tokens",
    "head": r"lm_head",
    "q_proj": r"q_proj\.weight",
    "k_proj": r"k_proj\.weight",
    "v_proj": r"v_proj\.weight",
    "o_proj": r"o_proj\.weight",
    "gate_proj": r"mlp\.gate_proj",
    "up_proj": r"mlp\.up_proj",
    "down_proj": r"mlp\.down_proj",
    "input norm": r"input_layernorm",
    "norm of the MLP": r"post_attention_layernorm",
    "last norm": r"model\.norm",
    "norm of q": r"q_norm",
    "router": r"mlp\.gate\.weight",
    "gate_proj of an expert": r"experts\.\d+\.gate_proj",
    "down_proj of an expert": r"experts\.\d+\.down_proj",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_proj of an expert", "down_proj of an expert")
MATRICES = ("embedding", "head", *LINEARS, "router", *EXPERTS)
NORMS = ("input norm", "norm of the MLP", "last norm", "norm of q")
SOME = ("embedding", "q_proj", "o_proj", "down_proj", "last norm", "down_proj of an expert")


class Place(NamedTuple):
    """One tensor, in which a fault is made. new, old: all tensors, and those of one update before."""

    name: str
    new: Tensors
    old: Tensors
    rng: np.random.Generator

    @property
    def value(self) -> np.ndarray:
        return self.new[self.name]

    @property
    def before(self) -> np.ndarray:
        return self.old[self.name]

    def other(self, pattern: str, replacement: str) -> np.ndarray:
        """Return another tensor, whose name is made of this one's. Raises KeyError."""
        return self.new[re.sub(pattern, replacement, self.name)]

    @property
    def scale(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.value, dtype=np.float64))))


class Way(NamedTuple):
    """named: kinds of ``compare.CLASSIFIERS`` that are right. classes: of tensors. everywhere: in all of a class."""

    name: str
    change: Change
    named: frozenset[str]
    classes: Sequence[str]
    everywhere: bool = False


class Fault(NamedTuple):
    """kind: its way and its class of tensors. tensors: all, as the engine has them. changed: names of those that are
    not the trainer's."""

    kind: str
    way: str
    named: frozenset[str]
    tensors: Tensors
    changed: list[str]


def _noise(size: float) -> Change:
    return lambda p: p.value + size * p.scale * p.rng.standard_normal(p.value.shape)


def _scaled(factor: float) -> Change:
    return lambda p: p.value * factor


def _flip(bit: int) -> Change:
    """Flip one bit of the bfloat16 in the middle of the tensor: 15 = the sign, 14 to 7 = the exponent."""

    def change(p: Place) -> np.ndarray:
        bits = in_dtype(p.value, "bfloat16").reshape(-1).copy()
        bits[bits.size // 2] ^= np.uint16(1 << bit)
        return widen(bits).reshape(p.value.shape)

    return change


def _rows(first: float, last: float, values: Callable[[Place], np.ndarray]) -> Change:
    """Replace a part of the rows."""

    def change(p: Place) -> np.ndarray:
        found, count = p.value.copy(), len(p.value)
        part = slice(int(first * count), max(int(last * count), int(first * count) + 1))
        found[part] = values(p)[part]
        return found

    return change


def _columns(values: Callable[[Place], np.ndarray]) -> Change:
    def change(p: Place) -> np.ndarray:
        found = p.value.copy()
        found[:, : found.shape[1] // 2] = values(p)[:, : found.shape[1] // 2]
        return found

    return change


def _run(copy: bool) -> Change:
    """A chunk of the bytes is there twice (copy), or is lost and the rest moves up."""

    def change(p: Place) -> np.ndarray:
        flat, size = p.value.reshape(-1).copy(), p.value.size // 4
        if copy:
            flat[2 * size : 3 * size] = flat[size : 2 * size]
        else:
            flat[size:-size] = flat[2 * size :]
        return flat.reshape(p.value.shape)

    return change


def _interleaved(p: Place) -> np.ndarray:
    """The dimensions of each head of 32 or 64 in the order of another rotary embedding."""
    dim = 64 if len(p.value) % 64 == 0 and p.value.shape[1] == 128 else 32
    return p.value.reshape(-1, 2, dim // 2, p.value.shape[1]).transpose(0, 2, 1, 3).reshape(p.value.shape)


def _swap_shards(p: Place) -> np.ndarray:
    return np.roll(p.value, len(p.value) // 2, 0)


def _part_lost(p: Place) -> np.ndarray:
    return np.where(p.rng.random(p.value.shape) < 0.4, p.before, p.value)


def _float8(p: Place) -> np.ndarray:
    """Round to 4 bits, as an 8-bit float has them, with a scale for the tensor."""
    mantissa, exponent = np.frexp(p.value)
    return np.ldexp(np.round(mantissa * 16) / 16, exponent)


def _int8(p: Place) -> np.ndarray:
    step = np.abs(p.value).max() / 127
    return np.round(p.value / step) * step


def _not_finite(p: Place) -> np.ndarray:
    found = p.value.copy()
    found.reshape(-1)[found.size // 3] = np.nan
    return found


def _ways() -> Iterator[Way]:
    stale, part = frozenset({"stale"}), frozenset({"part of the rows", "update in part", "few values"})
    yield Way("stale", lambda p: p.before, stale, tuple(CLASSES))
    yield Way("stale in all layers", lambda p: p.before, stale, (*LINEARS, *NORMS[:2], *EXPERTS, "router"), True)
    yield Way("zero", lambda p: 0 * p.value, frozenset({"zero"}), SOME)
    yield Way(
        "initial values", lambda p: p.scale * p.rng.standard_normal(p.value.shape), frozenset({"unrelated"}), MATRICES
    )
    yield Way("all ones", lambda p: np.ones_like(p.value), frozenset({"constant"}), NORMS)
    yield Way("transposed", lambda p: p.value.T.reshape(p.value.shape), frozenset({"transposed"}), MATRICES)
    yield Way("negated", _scaled(-1), frozenset({"scaled"}), SOME)
    for factor in (0.5, 2.0, 1.1, 1.01):
        yield Way(
            f"times {factor:g}", _scaled(factor), frozenset({"scaled", "near"}), ("o_proj", "embedding", "last norm")
        )
    yield Way("1 added", lambda p: p.value + 1, frozenset({"shifted"}), NORMS)
    yield Way("1 subtracted", lambda p: p.value - 1, frozenset({"shifted"}), NORMS)
    yield Way(
        "rounded to 8-bit floats",
        _float8,
        frozenset({"wrong dtype", "near", "update in part"}),
        ("q_proj", "down_proj", *EXPERTS),
    )
    yield Way(
        "rounded to 8-bit integers",
        _int8,
        frozenset({"wrong dtype", "near", "update in part"}),
        ("q_proj", "down_proj", *EXPERTS),
    )
    yield Way(
        "bytes of each number swapped",
        lambda p: widen(in_dtype(p.value, "bfloat16").byteswap()),
        frozenset({"byte order", "not finite"}),
        ("q_proj", "last norm"),
    )
    for bit in (15, 14, 12, 9, 7, 6, 3, 0):
        yield Way(
            f"bit {bit} of one number", _flip(bit), frozenset({"flipped bit", "not finite"}), ("q_proj", "last norm")
        )
    for size in (1.0, 0.1, 0.01, 0.003):
        yield Way(
            f"noise of {size:g}",
            _noise(size),
            frozenset({"near", "unrelated", "few values"}),
            ("q_proj", "down_proj", "down_proj of an expert"),
        )
    yield Way(
        "half of the rows stale",
        _rows(0.5, 1, lambda p: p.before),
        part,
        ("q_proj", "gate_proj", "embedding", "router"),
    )
    yield Way("half of the rows zero", _rows(0, 0.5, lambda p: 0 * p.value), part, ("q_proj", "gate_proj", "head"))
    yield Way(
        "one row zero", _rows(0.5, 0.5, lambda p: 0 * p.value), part, ("q_proj", "down_proj", "embedding", "router")
    )
    yield Way(
        "half of the columns stale",
        _columns(lambda p: p.before),
        frozenset({"part of the columns", "update in part"}),
        ("o_proj", "down_proj"),
    )
    yield Way(
        "values of an update lost", _part_lost, frozenset({"update in part"}), ("q_proj", "down_proj", "embedding")
    )
    yield Way(
        "half of an update",
        lambda p: (p.value + p.before) / 2,
        frozenset({"update in part", "near"}),
        ("q_proj", "down_proj"),
    )
    yield Way(
        "an update applied twice",
        lambda p: 2 * p.value - p.before,
        frozenset({"update in part", "near"}),
        ("q_proj", "down_proj"),
    )
    yield Way(
        "a chunk doubled",
        _run(True),
        frozenset({"moved", "rows", "part of the rows"}),
        ("q_proj", "down_proj", "embedding"),
    )
    yield Way(
        "a chunk lost",
        _run(False),
        frozenset({"moved", "rows", "part of the rows"}),
        ("q_proj", "down_proj", "embedding"),
    )
    yield Way("two shards swapped", _swap_shards, frozenset({"rows"}), ("q_proj", "gate_proj", "embedding"))
    yield Way("rotary dimensions interleaved", _interleaved, frozenset({"rows"}), ("q_proj", "k_proj"))
    yield Way(
        "heads reversed",
        lambda p: p.value.reshape(-1, 32, p.value.shape[1])[::-1].reshape(p.value.shape),
        frozenset({"rows"}),
        ("q_proj",),
    )
    yield Way("columns reversed", lambda p: p.value[:, ::-1], frozenset({"columns"}), ("o_proj", "down_proj"))
    yield Way(
        "that of another layer",
        lambda p: p.other(r"layers\.\d+", "layers.1"),
        frozenset({"another layer"}),
        ("q_proj", "down_proj", *NORMS[:2]),
    )
    yield Way(
        "that of another expert",
        lambda p: p.other(r"experts\.\d+", "experts.2"),
        frozenset({"another expert"}),
        EXPERTS,
    )
    yield Way(
        "up in place of gate",
        lambda p: p.other("gate_proj", "up_proj"),
        frozenset({"gate and up"}),
        ("gate_proj", EXPERTS[0]),
    )
    yield Way("v in place of k", lambda p: p.other("k_proj", "v_proj"), frozenset({"q, k, v"}), ("k_proj",))
    yield Way(
        "the embedding in place of the head",
        lambda p: p.new["model.embed_tokens.weight"],
        frozenset({"tied head"}),
        ("head",),
    )
    yield Way("the last norm's", lambda p: p.new["model.norm.weight"], frozenset({"another tensor"}), ("input norm",))
    yield Way("not a number", _not_finite, frozenset({"not finite"}), ("q_proj", "last norm"))
    yield Way(
        "an adapter added", lambda p: p.value + _low_rank(p), frozenset({"adapter", "near"}), ("q_proj", "down_proj")
    )


def _low_rank(p: Place) -> np.ndarray:
    rows, columns = p.value.shape
    return 0.1 * p.scale * p.rng.standard_normal((rows, 4)) @ p.rng.standard_normal((4, columns))


WAYS = tuple(_ways())


def faults(new: Tensors, old: Tensors, dtype_of: Callable[[str], str], seed: int = 0) -> Iterator[Fault]:
    """Yield every fault that this model can have, in the first tensor of its class or in all of them. dtype_of: the
    serving dtype of a tensor, to which its values are rounded."""
    for way in WAYS:
        for kind in way.classes:
            names = [name for name in new if re.search(CLASSES[kind], name)]
            tensors, rng = dict(new), np.random.default_rng(seed)
            try:
                for name in names if way.everywhere else names[:1]:
                    tensors[name] = _rounded(way.change(Place(name, new, old, rng)), dtype_of(name))
            except KeyError:  # this model has no such other tensor
                continue
            changed = [name for name in names if not _same(tensors[name], new[name])]
            if changed:
                yield Fault(f"{way.name}: {kind}", way.name, way.named, tensors, changed)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return widen(in_dtype(np.ascontiguousarray(values, np.float32), dtype))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def updated(tensors: Mapping[str, np.ndarray], dtype_of: Callable[[str], str], size: float, seed: int = 1) -> Tensors:
    """Return the tensors after an update of this relative size: that of the root mean square of each tensor."""
    changed = with_error(tensors, tensors, size, seed)
    return {name: _rounded(values, dtype_of(name)) for name, values in changed.items()}
