"""Tensors that differ in a known way: the check names the way, the tensor, and by how much."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from fastdeploy.core.fingerprint import ZERO, fingerprint
from fastdeploy.core.serving_dtype import dtype_of, in_dtype, widen
from fastdeploy.rl.check_sync.case import Earlier, Sides
from fastdeploy.rl.check_sync.compare import CLASSIFIERS, differences
from fastdeploy.rl.check_sync.report import Difference
from fastdeploy.rl.check_sync.weights import TrainerWeights
from support.checkpoints import QWEN_MOE, Spec, random_tensors, write_checkpoint

DENSE = Spec("dense", dtype="bfloat16", head_dim=16, seed=3)  # q_proj is square
MOE = Spec("moe", "Qwen3MoeForCausalLM", layers=3, head_dim=16, extra=QWEN_MOE, seed=15)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LAYER = "model.layers.0."
Q, K, GATE, UP = (f"{LAYER}{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up"))
NORM, DOWN, OUT = (f"{LAYER}{name}.weight" for name in ("input_layernorm", "mlp.down_proj", "self_attn.o_proj"))
EXPERT = f"{LAYER}mlp.experts.1.gate_proj.weight"
Tensors = dict[str, np.ndarray]
rng = np.random.default_rng(0)


def stepped(tensors: Tensors, share: float = 0.3) -> Tensors:
    """Return the tensors one update before: so many of their values were others."""
    return {
        name: (one * (1 + 0.02 * (rng.random(one.shape) < share) * rng.standard_normal(one.shape))).astype(np.float32)
        for name, one in tensors.items()
    }


def interleaved(one: np.ndarray) -> np.ndarray:
    """Return q or k with the dimensions of each head in the order of another rotary embedding."""
    return one.reshape(-1, 2, 8, one.shape[1]).transpose(0, 2, 1, 3).reshape(one.shape)


def flip(one: np.ndarray, at: int, bit: int) -> np.ndarray:
    bits = in_dtype(one, "bfloat16").reshape(-1).copy()
    bits[at] ^= 1 << bit
    return widen(bits).reshape(one.shape)


def half(one: np.ndarray, old: np.ndarray) -> np.ndarray:
    return np.concatenate([one[: len(one) // 2], old[len(one) // 2 :]])


def doubled(one: np.ndarray) -> np.ndarray:
    flat = one.reshape(-1).copy()
    flat[1000:1600] = flat[400:1000]
    return flat.reshape(one.shape)


def part_of(one: np.ndarray, old: np.ndarray, share: float) -> np.ndarray:
    """Return an update of which some values got lost, all over the tensor."""
    return np.where(np.random.default_rng(5).random(one.shape) < share, old, one)


def base_of(spec: Spec) -> Tensors:
    return random_tensors(replace(spec, seed=spec.seed + 100))


def adapter(rows: int, columns: int) -> np.ndarray:
    return 0.05 * rng.standard_normal((rows, 4)) @ rng.standard_normal((4, columns))


def few(rows: int, columns: int) -> np.ndarray:
    return (np.arange(rows * columns).reshape(rows, columns) % 2500 == 9).astype(np.float32)


def float16(one: np.ndarray) -> np.ndarray:
    return one.astype(np.float16).astype(np.float32)


# kind, words of the sentence, the tensor, and its values that serve: made of the trainer's new and previous tensors.
Make = Callable[[Tensors, Tensors], np.ndarray]
FAULTS: list[tuple[str, str, Spec, str, Make]] = [
    ("stale", "1 update before", DENSE, Q, lambda new, old: old[Q]),
    ("never updated", "the base model", MOE, EXPERT, lambda new, old: base_of(MOE)[EXPERT]),
    ("tied head", "embedding", DENSE, HEAD, lambda new, old: new[EMBEDDING]),
    ("zero", "0", MOE, EXPERT, lambda new, old: np.zeros_like(new[EXPERT])),
    ("another expert", "experts.2", MOE, EXPERT, lambda new, old: new[EXPERT.replace("1", "2")]),
    ("gate and up", "up_proj", DENSE, GATE, lambda new, old: new[UP]),
    ("q, k, v", "v_proj", DENSE, K, lambda new, old: new[K.replace("k_proj", "v_proj")]),
    ("another layer", "layers.1", DENSE, DOWN, lambda new, old: new[DOWN.replace("layers.0", "layers.1")]),
    ("another tensor", "model.norm", DENSE, NORM, lambda new, old: new["model.norm.weight"]),
    ("stale and another tensor", "up_proj", DENSE, GATE, lambda new, old: old[UP]),
    ("not finite", "1 values", DENSE, Q, lambda new, old: np.where(new[Q] == new[Q].max(), np.nan, new[Q])),
    ("constant", "1", DENSE, NORM, lambda new, old: np.ones_like(new[NORM])),
    ("byte order", "bytes", DENSE, NORM, lambda new, old: widen(in_dtype(new[NORM], "bfloat16").byteswap())),
    ("transposed", "transposed", DENSE, Q, lambda new, old: new[Q].T),
    ("transposed", "transposed", DENSE, DOWN, lambda new, old: new[DOWN].T.reshape(new[DOWN].shape)),
    ("flipped bit", "bit 9 at [1, 6]", DENSE, Q, lambda new, old: flip(new[Q], 70, 9)),
    ("wrong dtype", "float16", MOE, EXPERT, lambda new, old: float16(new[EXPERT])),
    ("wrong dtype", "bfloat16", MOE, EXPERT, lambda new, old: widen(in_dtype(new[EXPERT], "bfloat16"))),
    ("wrong dtype", "cut", DENSE, Q, lambda new, old: (new[Q].view(np.uint32) & 0xFFFF0000).view(np.float32)),
    ("scaled", "multiplied by 0.5", DENSE, OUT, lambda new, old: new[OUT] * 0.5),
    ("scaled", "negated", DENSE, OUT, lambda new, old: -new[OUT]),
    ("shifted", "1 is added", DENSE, NORM, lambda new, old: new[NORM] + 1),
    ("rows", "interleaved", DENSE, Q, lambda new, old: interleaved(new[Q])),
    ("rows", "heads are [2, 3, 0, 1]", DENSE, Q, lambda new, old: np.roll(new[Q], 32, 0)),
    ("rows", "2 shards are in the order [1, 0]", DENSE, GATE, lambda new, old: np.roll(new[GATE], 48, 0)),
    ("rows", "there twice", DENSE, GATE, lambda new, old: np.concatenate([new[GATE][:64], new[GATE][32:64]])),
    ("columns", "in another order", DENSE, OUT, lambda new, old: np.ascontiguousarray(np.roll(new[OUT], 16, 1))),
    ("fused", "up_proj", DENSE, GATE, lambda new, old: np.concatenate([new[GATE], new[UP]])[::2]),
    ("moved", "places away", DENSE, EMBEDDING, lambda new, old: doubled(new[EMBEDDING])),
    ("part of the rows", "1 update before", DENSE, GATE, lambda new, old: half(new[GATE], old[GATE])),
    ("part of the rows", "they are 0", DENSE, GATE, lambda new, old: half(new[GATE], 0 * new[GATE])),
    ("part of the columns", "1 update before", DENSE, OUT, lambda new, old: half(new[OUT].T, old[OUT].T).T),
    ("update in part", "got lost", DENSE, Q, lambda new, old: part_of(new[Q], old[Q], 0.4)),
    ("update in part", "2.00 times", MOE, EXPERT, lambda new, old: 2 * new[EXPERT] - old[EXPERT]),
    ("update in part", "50%", MOE, EXPERT, lambda new, old: (new[EXPERT] + old[EXPERT]) / 2),
    ("scaled rows", "each row", DENSE, OUT, lambda new, old: new[OUT] * np.linspace(0.2, 3, 64)[:, None]),
    ("adapter", "rank 4", DENSE, GATE, lambda new, old: new[GATE] + adapter(96, 64)),
    ("few values", "only 3 of", DENSE, GATE, lambda new, old: new[GATE] + few(96, 64)),
    ("near", "near the trainer's", DENSE, GATE, lambda new, old: new[GATE] + 0.001 * rng.standard_normal((96, 64))),
    ("unrelated", "nothing in common", DENSE, GATE, lambda new, old: 0.1 * rng.standard_normal((96, 64))),
]  # fmt: skip


class Trained(NamedTuple):
    """A trainer of a model, and the previous weights, in the serving dtype."""

    trainer: TrainerWeights
    new: Tensors
    old: Tensors
    sides: Sides


def stored(tensors: Mapping[str, np.ndarray], dtype: str) -> Tensors:
    with np.errstate(all="ignore"):
        return {n: in_dtype(np.ascontiguousarray(t, np.float32), dtype_of(n, dtype)) for n, t in tensors.items()}


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: fingerprint(one).hex for name, one in tensors.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Mapping[str, Trained]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for spec in (DENSE, MOE):
            folder = write_checkpoint(tmp_path_factory.mktemp("models") / spec.name, spec)
            dtype = "bfloat16" if spec.dtype == "bfloat16" else "float32"
            new = random_tensors(spec)
            old = stepped(new)
            trainer = stack.enter_context(TrainerWeights(new, folder, dtype))
            expected, previous = {n: one.hex for n, one in trainer.fingerprints().items()}, stored(old, dtype)
            earlier = Earlier("1 update before", digests(previous), previous.__getitem__)
            base = Earlier("the base model", digests(stored(base_of(spec), dtype)))
            sides = Sides(
                expected, {}, [earlier], trainer.read, trainer.read_wide, dtype, trainer.model.config, base, ZERO.hex
            )
            found[spec.name] = Trained(trainer, new, old, sides)
        yield found


def found(one: Trained, changed: Mapping[str, np.ndarray]) -> list[Difference]:
    """Compare the trainer's tensors with the same tensors of which some are ``changed``."""
    dtype = one.sides.dtype
    served = stored(changed, dtype)
    sides = replace(one.sides, served={**one.sides.expected, **digests(served)})
    names = [name for name in one.trainer.shapes if sides.expected[name] != sides.served[name]]
    return list(differences(names, sides, one.trainer.shapes, lambda asked: ((n, served[n]) for n in asked)))


@pytest.mark.parametrize(
    ("kind", "words", "spec", "name", "make"), FAULTS, ids=[f"{n}-{fault[0]}" for n, fault in enumerate(FAULTS)]
)
def test_a_planted_fault_is_named(kind, words, spec, name, make, trained):
    one = trained[spec.name]
    [difference] = found(one, {name: make(one.new, one.old)})
    assert (difference.tensor, difference.kind) == (name, kind), difference.how
    assert words in difference.how
    assert difference.changed > 0 and (difference.max_abs > 0 or kind == "not finite")


def test_one_tensor_in_the_place_of_two_is_named(trained):
    one = trained["moe"]
    first, second = (f"{LAYER}mlp.experts.{number}.up_proj.weight" for number in (0, 1))
    twice = {first: one.new[first] + 0.3 * one.new[second], second: one.new[first] + 0.3 * one.new[second]}
    differing = found(one, twice)
    assert [(d.tensor, d.kind) for d in differing] == [(first, "repeated"), (second, "repeated")]
    assert differing[0].how.endswith(second)


def test_every_kind_of_the_table_has_a_planted_fault():
    assert {one.kind for one in CLASSIFIERS} - {"repeated"} == {fault[0] for fault in FAULTS}


def test_a_difference_says_where_it_begins_and_how_large_it_is(trained):
    one = trained["moe"]
    other = one.new[EXPERT].copy()
    other[3, 5], other[4, 0] = 2.0, -3.0
    [difference] = found(one, {EXPERT: other})
    assert (difference.changed, difference.values, difference.first) == (2, 48 * 64, 3 * 64 + 5)
    assert (difference.expected, difference.served) == (one.new[EXPERT][3, 5], 2.0)
    assert difference.max_abs == pytest.approx(abs(-3.0 - one.new[EXPERT][4, 0]))
    assert difference.relative == pytest.approx(difference.max_abs / np.abs(one.new[EXPERT]).max())
