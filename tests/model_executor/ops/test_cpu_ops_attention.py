"""Paged attention equals the reference. The bits of a request are the same alone, in a batch and in any chunks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.blocks import AttentionSpec
from fastdeploy.model_executor.ops.interface import AttentionBatch
from fastdeploy.model_executor.ops.reference import ReferenceOps

MAX_LEN = 4096
PARTITION = 1024  # keys, counted from position 0: more than that can be several tasks
CHUNK = 256  # tokens of a long request that the reference computes in one step


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    norms: bool


# Groups of 7, 1, 2 and 4 heads; dims that need padding; blocks of 16, 32 and 64; with and without norms.
SHAPES = [
    Shape(14, 2, 64, 64, False),
    Shape(4, 4, 32, 32, True),
    Shape(4, 2, 40, 16, True),
    Shape(8, 2, 128, 32, False),
]
SMALL = Shape(4, 2, 32, 32, True)


def make_spec(rng: np.random.Generator, shape: Shape, layer: int = 0, window: int = 0) -> AttentionSpec:
    angles = rng.uniform(0, 6.28, (MAX_LEN, shape.dim // 2)).astype(np.float32)
    norm = [paddle.to_tensor(rng.uniform(0.5, 1.5, shape.dim).astype(np.float32)) for _ in range(2)]
    q_norm, k_norm = norm if shape.norms else (None, None)
    return AttentionSpec(
        layer, shape.heads, shape.kv_heads, shape.dim, shape.dim**-0.5, paddle.to_tensor(np.cos(angles)),
        paddle.to_tensor(np.sin(angles)), q_norm, k_norm, 1e-6, window=window,
    )  # fmt: skip


def make_batch(starts: list[int], counts: list[int], tables: list[list[int]]) -> AttentionBatch:
    width = max(map(len, tables))
    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    return AttentionBatch(
        np.cumsum([0, *counts]).astype(np.int32),
        np.array(starts, np.int32),
        np.array([table + [0] * (width - len(table)) for table in tables], np.int32),
        np.array(positions, np.int32),
    )


class Sequences:
    """Random qkv rows of requests whose blocks are shuffled."""

    def __init__(self, rng: np.random.Generator, shape: Shape, lengths: list[int]):
        self.shape, self.lengths = shape, lengths
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.qkv = [rng.standard_normal((n, width)).astype(np.float32) for n in lengths]
        blocks = [-(-n // shape.block_size) for n in lengths]
        ids = rng.permutation(sum(blocks) + 3).tolist()
        self.num_blocks = len(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]

    def new_cache(self, ops, layers: int = 1):
        return ops.new_kv_cache(layers, self.num_blocks, self.shape.block_size, self.shape.kv_heads, self.shape.dim)

    def run(
        self, ops, spec: AttentionSpec, cuts: list[list[int]], only: list[int] | None = None, cache=None
    ) -> list[np.ndarray]:
        """Compute cuts[r][i] tokens of request r in step i. Returns the outputs of each request (of ``only``)."""
        chosen = range(len(self.lengths)) if only is None else only
        cache = self.new_cache(ops) if cache is None else cache
        done = dict.fromkeys(chosen, 0)
        outputs: dict[int, list[np.ndarray]] = {r: [] for r in chosen}
        for step in range(max(len(cuts[r]) for r in chosen)):
            now = [r for r in chosen if step < len(cuts[r]) and cuts[r][step] > 0]
            counts = [cuts[r][step] for r in now]
            batch = make_batch([done[r] for r in now], counts, [self.tables[r] for r in now])
            rows = np.concatenate([self.qkv[r][done[r] : done[r] + c] for r, c in zip(now, counts, strict=True)])
            out = ops.attention(paddle.to_tensor(rows), cache, batch, spec).numpy()
            for r, c, part in zip(now, counts, np.split(out, np.cumsum(counts)[:-1]), strict=True):
                outputs[r].append(part)
                done[r] += c
        assert all(done[r] == self.lengths[r] for r in chosen)
        return [np.concatenate(outputs[r]) for r in chosen]

    def of_reference(self, dtype: str, spec: AttentionSpec) -> list[np.ndarray]:
        """Compute each request alone and in short chunks. The reference gives the same bits in any batch and any
        chunks (test_reference_ops.py), but all rows of a step take as long as the one with the most keys."""
        cuts = [[min(CHUNK, n - first) for first in range(0, n, CHUNK)] for n in self.lengths]
        return [self.run(ReferenceOps(dtype), spec, cuts, only=[r])[0] for r in range(len(self.lengths))]


# float32: only the order of summation and exp differ. bfloat16 on vectors: the same on equally rounded keys and values.
# Where bfloat16 is multiplied, queries and probabilities are rounded to it: 2^-9 relative on each, values of order 1.
def tolerance(isa: str, dtype: str) -> float:
    if dtype == "float32":
        return 2e-5
    return 2e-2 if isa in ("avx512_bf16", "amx") else 5e-3


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)  # without norms, and with norms
def test_a_rotation_of_a_part_of_each_head_agrees_with_the_reference(
    ops, reference, isa, dtype, rng, shape, interleaved
):
    spec, lengths = make_spec(rng, shape), [1, 17, 40]
    tables = {"rope_cos": spec.rope_cos[:, :6].clone(), "rope_sin": spec.rope_sin[:, :6].clone()}
    spec = spec._replace(rotary_dim=12, interleaved=interleaved, **tables)
    sequences, cuts = Sequences(rng, shape, lengths), [[n] for n in lengths]
    found, expected = sequences.run(ops, spec, cuts), sequences.run(reference, spec, cuts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance(isa, dtype))
    whole = sequences.run(reference, spec._replace(rotary_dim=2 * 6, interleaved=1 - interleaved), cuts)
    assert np.abs(whole[2] - expected[2]).max() > 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_agrees_with_the_reference(ops, reference, isa, dtype, rng, shape):
    spec, lengths = make_spec(rng, shape), [1, 17, 64, 131, 70]
    sequences = Sequences(rng, shape, lengths)
    cuts = [[1], [10, 7], [64], [100, 1, 30], [69, 1]]
    actual, expected = sequences.run(ops, spec, cuts), sequences.run(reference, spec, cuts)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance(isa, dtype))


def long_requests(shape: Shape, lengths: tuple[int, ...]) -> tuple[AttentionSpec, Sequences]:
    rng = np.random.default_rng(5)
    return make_spec(rng, shape), Sequences(rng, shape, list(lengths))


@cache
def long_reference(dtype: str, shape: Shape, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Return what the reference, which is slow, says for all instruction sets."""
    spec, sequences = long_requests(shape, lengths)
    return sequences.of_reference(dtype, spec)


@pytest.mark.covers("isa dtype", "dtype shape lengths")
@pytest.mark.parametrize(
    "shape, lengths",
    [(SHAPES[0], (PARTITION + 40, 40)), (SHAPES[2], (PARTITION, PARTITION + 1, 2 * PARTITION + 200))],
    ids=str,
)
def test_attention_agrees_with_the_reference_across_partitions(ops, isa, dtype, shape, lengths):
    spec, sequences = long_requests(shape, lengths)
    found = sequences.run(ops, spec, [[n - 4, 1, 3] for n in lengths])
    for a, e in zip(found, long_reference(dtype, shape, lengths), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance(isa, dtype))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_a_request_has_the_same_bits_alone_and_among_others(ops, rng, shape):
    spec, lengths = make_spec(rng, shape), [int(n) for n in rng.integers(1, 90, 32)]
    sequences = Sequences(rng, shape, lengths)
    cuts = [[n - n // 3, *[1] * (n // 3)] for n in lengths]
    together = sequences.run(ops, spec, cuts)
    for r in (0, 13, 31):
        np.testing.assert_array_equal(sequences.run(ops, spec, cuts, only=[r])[0], together[r])


def test_bits_do_not_depend_on_the_block_size(ops, rng):
    spec, rows = make_spec(rng, SMALL), Sequences(rng, SMALL, [150]).qkv
    results = []
    for block_size in (16, 32, 48, 64):
        sequences = Sequences(rng, SMALL._replace(block_size=block_size), [150])
        sequences.qkv = rows
        results.append(sequences.run(ops, spec, [[100, 1, 49]])[0])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


SHORT_CUTS = [[64, 64, 22], [1, 149], [33, 50, 67], [10] * 15, [100, *[1] * 50]]
# As a whole, one task computes all partitions of its keys. A short step becomes several tasks.
LONG_CUTS = [[1024, 1024, 52], [700, 700, 700], [1020, *[1] * 8, 1072], [2040, *[1] * 16, 44]]


@pytest.mark.parametrize(("shape", "cuts"), [*((shape, SHORT_CUTS) for shape in SHAPES), (SMALL, LONG_CUTS)], ids=str)
def test_a_prompt_has_the_same_bits_in_any_cut(ops, rng, shape, cuts):
    length = sum(cuts[0])
    spec, sequences = make_spec(rng, shape), Sequences(rng, shape, [length])
    whole = sequences.run(ops, spec, [[length]])[0]
    for cut in cuts:
        np.testing.assert_array_equal(sequences.run(ops, spec, [cut])[0], whole)


def test_a_long_request_has_the_same_bits_alone_and_among_others(ops, rng):
    """Beside short requests, its step is split into several tasks; beside a long chunk of another it is one task."""
    spec, lengths = make_spec(rng, SMALL), [2100, 1500, *(int(n) for n in rng.integers(1, 90, 30))]
    sequences = Sequences(rng, SMALL, lengths)
    cuts = [[2096, 1, 1, 2], [0, 1500], *([n] for n in lengths[2:])]
    together = sequences.run(ops, spec, cuts)[0]
    np.testing.assert_array_equal(sequences.run(ops, spec, cuts, only=[0])[0], together)
    cuts = [[2096, 1, 1, 2], *([0, n - n // 2, *[1] * (n // 2)] for n in lengths[1:])]
    np.testing.assert_array_equal(sequences.run(ops, spec, cuts, only=[0, *range(2, 32)])[0], together)


def test_work_is_cut_into_tasks_by_what_else_there_is(ops, rng):
    spec, cache = make_spec(rng, SMALL), ops.new_kv_cache(1, 64, SMALL.block_size, SMALL.kv_heads, SMALL.dim)

    def tasks(starts: list[int], counts: list[int]) -> int:
        tables = [[r] * (MAX_LEN // SMALL.block_size) for r in range(len(starts))]  # no two share a beginning
        return ops.attention_tasks(cache, make_batch(starts, counts, tables), spec)

    heads = SMALL.kv_heads
    expected = [heads * partitions for partitions in (1, 1, 1, 2, 2, 3)]
    assert [tasks([keys - 1], [1]) for keys in (1, 64, 1024, 1025, 2048, 3000)] == expected
    assert tasks([1020], [8]) == 2 * heads, "the second partition has the last four tokens only"
    assert tasks([60] * 15, [1] * 15) == 15 * heads
    assert tasks([60] * 16, [1] * 16) == 16, "all KV heads of a request are one task if there are enough others"
    assert tasks([3000, *[60] * 7], [1] * 8) == 3 * heads + 7
    assert tasks([1500] * 63, [1] * 63) == 63 * 2
    assert tasks([1500] * 64, [1] * 64) == 64, "all partitions are one task if there are enough others"
    assert tasks([2500, 0], [1, 4000]) == 1 + 63 * heads, "a long chunk makes enough tasks"


def test_tokens_of_a_later_partition_do_not_change_earlier_rows_of_the_same_task(ops, rng):
    """One task has tokens of two partitions. Keys and values of the second one are not finite."""
    spec, sequences = make_spec(rng, SMALL), Sequences(rng, SMALL, [PARTITION + 4])
    cuts = [[PARTITION - 4, 8]]
    clean = sequences.run(ops, spec, cuts)[0]
    sequences.qkv[0][PARTITION:] = np.inf
    spoilt = sequences.run(ops, spec, cuts)[0]
    np.testing.assert_array_equal(spoilt[:PARTITION], clean[:PARTITION])


@pytest.mark.parametrize("long", [200, PARTITION + 100, pytest.param(2100, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_number_of_threads(ops, rng, threads, long):
    spec, sequences = make_spec(rng, SHAPES[0]), Sequences(rng, SHAPES[0], [long, 40, 3])
    cuts = [[long - 50, 49, 1], [40], [2, 1]]
    results = []
    for count in (1, 2, 5):
        ops.set_num_threads(count)
        results.append(sequences.run(ops, spec, cuts))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_old_values_in_a_reused_block_are_not_read(ops, rng):
    spec = make_spec(rng, SMALL)
    sequences = Sequences(rng, SMALL, [45])
    clean = sequences.run(ops, spec, [[40, 5]])[0]
    cache = sequences.new_cache(ops)
    width = (SMALL.heads + 2 * SMALL.kv_heads) * SMALL.dim
    for poison in (np.nan, np.inf):
        for block in range(sequences.num_blocks):
            rows = paddle.full([SMALL.block_size, width], poison)
            ops.attention(rows, cache, make_batch([0], [SMALL.block_size], [[block]]), spec)
        np.testing.assert_array_equal(sequences.run(ops, spec, [[40, 5]], cache=cache)[0], clean)


# The effect of a value does not depend on the shape, so one shape has all values and one value has all shapes.
@pytest.mark.covers("isa dtype part", "isa shape bad", "dtype shape bad part")
@pytest.mark.parametrize(
    ("shape", "bad"), [(SHAPES[0], -np.inf), (SHAPES[0], 3.4e38), *((shape, np.nan) for shape in SHAPES)], ids=str
)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_key_or_value_that_is_not_finite_changes_later_rows_only(ops, reference, dtype, rng, shape, bad, part):
    """Earlier rows keep their bits, since other requests may share their KV. 3.4e38 is infinite in bfloat16."""
    spec, sequences = make_spec(rng, shape), Sequences(rng, shape, [90])
    clean = sequences.run(ops, spec, [[90]])[0]
    column = shape.heads if part == "key" else shape.heads + shape.kv_heads
    sequences.qkv[0][41, column * shape.dim + 3] = bad
    heads = np.arange(shape.heads) < shape.heads // shape.kv_heads  # those of the first kv head
    may_be_finite = bad == 3.4e38 and (dtype == "float32" or part == "key")  # the rotation makes a key smaller
    for one in (ops, reference):
        for cuts in ([90], [41, 1, 48], [20, 30, 40]):
            dirty = sequences.run(one, spec, [cuts])[0].reshape(90, shape.heads, shape.dim)
            assert np.isfinite(dirty[:41]).all() and np.isfinite(dirty[:, ~heads]).all()
            assert may_be_finite or np.isnan(dirty[41:, heads]).all()
            if one is ops:
                np.testing.assert_array_equal(dirty[:41].reshape(41, -1), clean[:41])


def test_layers_do_not_share_slots(ops, rng):
    specs, sequences = [make_spec(rng, SMALL, layer) for layer in range(3)], Sequences(rng, SMALL, [50])
    cache = sequences.new_cache(ops, layers=3)
    batch = make_batch([0], [49], sequences.tables)
    for spec in specs:
        ops.attention(paddle.to_tensor(sequences.qkv[0][:49] * (spec.layer + 1)), cache, batch, spec)
    for spec in specs:
        rows = sequences.qkv[0] * (spec.layer + 1)
        last = ops.attention(paddle.to_tensor(rows[49:]), cache, make_batch([49], [1], sequences.tables), spec).numpy()
        fresh = sequences.new_cache(ops, layers=3)
        whole = ops.attention(paddle.to_tensor(rows), fresh, make_batch([0], [50], sequences.tables), spec).numpy()
        np.testing.assert_array_equal(last[0], whole[49])


def test_a_copied_block_reads_like_its_source(ops, rng):
    spec, sequences = make_spec(rng, SMALL, layer=1), Sequences(rng, SMALL, [40])
    cache = sequences.new_cache(ops, layers=2)
    rows = sequences.qkv[0]
    ops.attention(paddle.to_tensor(rows[:39]), cache, make_batch([0], [39], sequences.tables), spec)
    free = sorted(set(range(sequences.num_blocks)) - set(sequences.tables[0]))[:2]
    first, second = sequences.tables[0]
    ops.copy_blocks(cache, [second, first, free[0]], [free[1], free[0], second])  # the last pair reads a copy
    expected = ops.attention(
        paddle.to_tensor(rows[39:]), cache, make_batch([39], [1], [[first, free[1]]]), spec
    ).numpy()
    copied = ops.attention(paddle.to_tensor(rows[39:]), cache, make_batch([39], [1], [free]), spec).numpy()
    np.testing.assert_array_equal(copied, expected)
    moved = ops.attention(paddle.to_tensor(rows[39:]), cache, make_batch([39], [1], [[second, free[1]]]), spec).numpy()
    np.testing.assert_array_equal(moved, expected)


# Every length for groups of 7 heads; the other shapes with a length of one partition and with one of several.
@pytest.mark.covers("isa dtype", "isa shape shared window", "dtype shape shared window")
@pytest.mark.parametrize(
    ("shape", "shared", "window"),
    [
        *((SHAPES[0], n, 0) for n in (64, 256, 1000)),
        *((shape, n, 0) for shape in SHAPES for n in (130, 2100)),
        *((SHAPES[0], 1000, n) for n in (80, 150, 900)),
        (SMALL, 2100, 1100),
    ],
    ids=str,
)
def test_samples_of_one_prompt_have_the_same_bits_together_and_alone(ops, threads, rng, shape, shared, window):
    """Nine samples share the blocks of their prompt; some have drafts. Others share fewer blocks or none, or are in
    prefill."""
    spec, size = make_spec(rng, shape, window=window), shape.block_size
    width, whole = (shape.heads + 2 * shape.kv_heads) * shape.dim, shared // size
    own = 3  # blocks of a sample behind the prompt's
    ids = rng.permutation(200).tolist()
    prompt = [ids.pop() for _ in range(whole)]
    starts, tables = [], []
    for _ in range(9):
        starts.append(whole * size + int(rng.integers(0, own * size - 8)))
        tables.append(prompt + [ids.pop() for _ in range(own)])
    starts.insert(4, 70)  # less than the prompt
    tables.insert(4, [*prompt[: -(-16 // size)], *(ids.pop() for _ in range(-(-80 // size)))])
    counts = [1, 1, 3, 1, 1, 2, 2, 9, 1, 1]
    starts.append(0), tables.append([ids.pop() for _ in range(2)]), counts.append(20)
    starts.append(5), tables.append([ids.pop()]), counts.append(1)
    cache, used = ops.new_kv_cache(1, 200, size, shape.kv_heads, shape.dim), set()
    for start, table in zip(starts, tables, strict=True):  # what lies in the cache before the step
        first = len(prompt) * size if used.issuperset(prompt) and table[:whole] == prompt else 0
        if start > first:
            rows = rng.standard_normal((start - first, width)).astype(np.float32)
            ops.attention(paddle.to_tensor(rows), cache, make_batch([first], [start - first], [table]), spec)
        used.update(table)
    rows = [rng.standard_normal((count, width)).astype(np.float32) for count in counts]
    together = ops.attention(
        paddle.to_tensor(np.concatenate(rows)), cache, make_batch(starts, counts, tables), spec
    ).numpy()
    ops.set_num_threads(1)
    alone = [
        ops.attention(paddle.to_tensor(row), cache, make_batch([start], [count], [table]), spec).numpy()
        for row, start, count, table in zip(rows, starts, counts, tables, strict=True)
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_neighbours_that_decode_behind_the_same_blocks_are_one_task(ops, rng):
    """Sharing changes no bit, so the test counts tasks: each task of shared keys reads them once. There are 2 heads."""
    shape = Shape(32, 2, 64, 32, False)  # groups of 16 heads: 8 sequences fill the 128 rows of a task
    cache, spec = ops.new_kv_cache(1, 100, shape.block_size, shape.kv_heads, shape.dim), make_spec(rng, shape)

    def tasks(shared: list[int], start: int = 200, tokens: int = 1) -> int:
        """Count the tasks of sequences that compute ``tokens``. The i-th begins with shared[i] blocks of the first."""
        tables = [[*range(count), *range(10 + 7 * i, 10 + 7 * i + 7 - count)] for i, count in enumerate(shared)]
        return ops.attention_tasks(cache, make_batch([start] * len(shared), [tokens] * len(shared), tables), spec)

    assert tasks([0, 0, 0, 0]) == 4 * 2
    assert tasks([4, 4, 4, 4]) == 2
    assert tasks([4] * 9) == 2 * 2, "a task has room for eight"
    assert tasks([4] * 4, tokens=2) == 2, "drafts share the keys, too"
    assert tasks([4] * 4, tokens=3) == 2 * 2
    assert tasks([4] * 4, tokens=9) == 2 * 4 * 2, "each has rows for two tasks"
    assert tasks([1, 1, 1]) == 3 * 2, "32 shared keys are less than a key block of 64"
    assert tasks([2, 2, 0, 0]) == 3 * 2
    assert tasks([2, 6, 6]) == 2 * 2, "the second and the third share more than the first two"
    assert tasks([4, 4], start=40) == 2 * 2, "less than a key block is shared"
