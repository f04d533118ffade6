"""Attention with a sliding window equals the reference, has the same bits in any batch, and reads no key outside it."""

from __future__ import annotations

from ctypes import c_int64, memset
from functools import cache

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.cpu_library import CpuKVCache
from fastdeploy.model_executor.ops.reference import ReferenceKVCache
from model_executor.ops.test_cpu_ops_attention import SHAPES, SMALL, Sequences, make_batch, make_spec, tolerance

LENGTHS, CUTS = (1, 17, 131, 200), [[1], [10, 7], [100, 1, 30], [64, 136]]
LONG_LENGTHS, LONG_CUTS = (2200, 1030), [[2196, 1, 3], [1030]]


def run(ops, shape, window: int, lengths, cuts) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return Sequences(rng, shape, list(lengths)).run(ops, make_spec(rng, shape, window=window), cuts)


@cache
def expected(dtype: str, shape, window: int, lengths) -> list[np.ndarray]:
    """Return what the reference, which is slow, says for all instruction sets."""
    rng = np.random.default_rng(5)
    return Sequences(rng, shape, list(lengths)).of_reference(dtype, make_spec(rng, shape, window=window))


@pytest.mark.covers("isa dtype shape", "isa shape window")
@pytest.mark.parametrize(
    ("shape", "window", "lengths"),
    [
        *((SHAPES[0], window, LENGTHS) for window in (1, 20, 64, 65, 150)),
        (SHAPES[2], 30, LENGTHS),
        *((SMALL, window, LONG_LENGTHS) for window in (100, 1024, 1500)),
    ],
    ids=str,
)
def test_a_window_agrees_with_the_reference(ops, isa, dtype, shape, window, lengths):
    found = run(ops, shape, window, lengths, CUTS if lengths == LENGTHS else LONG_CUTS)
    for a, e in zip(found, expected(dtype, shape, window, lengths), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance(isa, dtype))


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_the_reference_sees_exactly_the_keys_of_the_window(reference, rng):
    """As transformers: with a window of 4, the token at position 9 sees the keys 6 to 9."""
    shape, window = SMALL._replace(norms=False), 4
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    spec = make_spec(rng, shape, window=window)
    sequences = Sequences(rng, shape, [100])
    before = sequences.run(reference, spec, [[100]])[0]
    for key in (50, 80):
        sequences.qkv[0][key, shape.heads * shape.dim : width] += 1.0
        after = sequences.run(reference, spec, [[100]])[0]
        changed = np.flatnonzero((after != before).any(-1))
        assert changed.tolist() == list(range(key, key + window))
        before = after


@pytest.mark.covers("isa dtype", "isa window", "dtype window")
@pytest.mark.parametrize("window", [30, 700, 1024, 1500])
def test_a_request_with_a_window_has_the_same_bits_in_any_batch_cut_and_number_of_threads(ops, threads, rng, window):
    """The rows of one task, and the members of a group, see different beginnings of the keys: so do its partitions."""
    spec, lengths = make_spec(rng, SMALL, window=window), [2200, 1500, 90, 64]
    sequences = Sequences(rng, SMALL, lengths)
    together = sequences.run(ops, spec, [[2195, 1, 1, 3], [0, 1500], [89, 1], [64]])
    for cuts in ([2200], [1024, 1024, 152], [1090, *[1] * 8, 1102], [2150, *[1] * 50]):
        np.testing.assert_array_equal(sequences.run(ops, spec, [cuts], only=[0])[0], together[0])
    ops.set_num_threads(1)
    for r, length in enumerate(lengths):
        alone = sequences.run(ops, spec, {r: [length - 1, 1]}, only=[r])[0]
        np.testing.assert_array_equal(alone, together[r])


def test_a_window_as_long_as_the_context_changes_no_bit(ops):
    lengths, cuts = [1100, 70], [[1090, 10], [30, 40]]
    for a, b in zip(run(ops, SMALL, 1100, lengths, cuts), run(ops, SMALL, 0, lengths, cuts), strict=True):
        np.testing.assert_array_equal(a, b)


def spoil(kv_cache, shape, blocks: list[int]) -> None:
    """Overwrite keys and values of these blocks with NaN."""
    if isinstance(kv_cache, ReferenceKVCache):
        slots = paddle.to_tensor(np.concatenate([np.arange(b, b + 1) * shape.block_size for b in blocks]))
        slots = (slots.unsqueeze(1) + paddle.arange(shape.block_size)).flatten()
        for layer in (*kv_cache.keys, *kv_cache.values):
            paddle.scatter_(layer, slots, paddle.full([len(slots), *layer.shape[1:]], np.nan))
        return
    assert isinstance(kv_cache, CpuKVCache)
    data = c_int64.from_address(kv_cache.handle + 10 * 8).value  # the last field of Cache in kernels.h
    nbytes = kv_cache.nbytes // kv_cache.num_blocks
    for block in blocks:
        memset(data + block * nbytes, 0xFF, nbytes)


def assert_keys_outside_the_window_are_not_read(ops, rng, count: int, shared: bool) -> None:
    """They are NaN here: a key or a value that is read is multiplied, and the product with NaN is NaN."""
    shape, window, start = SMALL, 100, 1900
    spec, width = make_spec(rng, shape, window=window), (shape.heads + 2 * shape.kv_heads) * shape.dim
    blocks = -(-(start + count) // shape.block_size)
    rows = [rng.standard_normal((n, width)).astype(np.float32) for n in (start, 2 * count)]
    tables = [list(range(blocks)), [*range(start // shape.block_size), *range(blocks, blocks + 3)]]
    tables = tables if shared else tables[:1]
    batch = make_batch([start] * len(tables), [count] * len(tables), tables)
    first = (start - window + 1) // 64 * 64
    kv_cache = ops.new_kv_cache(1, blocks + 3, shape.block_size, shape.kv_heads, shape.dim)
    ops.attention(paddle.to_tensor(rows[0]), kv_cache, make_batch([0], [start], tables[:1]), spec)
    step = paddle.to_tensor(rows[1][: count * len(tables)])
    clean = ops.attention(step, kv_cache, batch, spec).numpy()
    spoil(kv_cache, shape, list(range(first // shape.block_size)))
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(ops.attention(step, kv_cache, batch, spec).numpy(), clean)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_keys_outside_the_window_are_not_read(ops, rng, count, shared):
    assert_keys_outside_the_window_are_not_read(ops, rng, count, shared)


def test_the_reference_reads_no_keys_outside_the_window(reference, rng):
    for count, shared in ((1, False), (5, True)):
        assert_keys_outside_the_window_are_not_read(reference, rng, count, shared)


def test_a_long_request_is_cut_into_tasks_by_the_keys_of_its_window(ops, rng):
    cache = ops.new_kv_cache(1, 64, SMALL.block_size, SMALL.kv_heads, SMALL.dim)
    shape = SMALL._replace(heads=8)

    def tasks(window: int, starts: list[int], shared: int = 0) -> int:
        tables = [[*range(shared), *([40 + r] * (96 - shared))] for r in range(len(starts))]
        spec = make_spec(rng, shape, window=window)
        return ops.attention_tasks(cache, make_batch(starts, [1] * len(starts), tables), spec)

    assert [tasks(window, [3000]) for window in (0, 3000, 900, 100)] == [3 * 2, 3 * 2, 1 * 2, 1 * 2]
    assert tasks(100, [2050]) == 2 * 2, "the window has keys of two partitions"
    assert tasks(0, [700] * 4, shared=20) == 2, "neighbours behind the same 640 keys are one task"
    assert tasks(200, [700] * 4, shared=20) == 2, "their windows have a part of these keys"
    assert tasks(50, [700] * 4, shared=20) == 4 * 2, "their windows have none of them"
