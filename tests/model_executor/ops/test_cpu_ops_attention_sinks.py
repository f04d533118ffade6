"""Attention with sinks equals the reference, whose formula is checked here, and has the same bits in any batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import paddle
import pytest

from model_executor.ops.test_cpu_ops_attention import (
    PARTITION,
    SHAPES,
    SMALL,
    Sequences,
    make_batch,
    make_spec,
    tolerance,
)

LENGTHS, CUTS = [1, 17, 131, PARTITION + 70], [[1], [10, 7], [100, 1, 30], [PARTITION + 66, 1, 3]]


def with_sinks(rng: np.random.Generator, shape, window: int = 0, largest: float = 5.0):
    """Return a spec whose heads have sinks from far below all scores to ``largest``."""
    sinks = np.linspace(-60, largest, shape.heads).astype(np.float32)
    return make_spec(rng, shape, window=window)._replace(sinks=paddle.to_tensor(sinks))


def requests(shape, window: int):
    rng = np.random.default_rng(5)
    return with_sinks(rng, shape, window), Sequences(rng, shape, LENGTHS)


@cache
def expected(dtype: str, shape, window: int) -> list[np.ndarray]:
    """Return what the reference, which is slow, says for all instruction sets."""
    spec, sequences = requests(shape, window)
    return sequences.of_reference(dtype, spec)


@pytest.mark.covers("isa dtype", "isa shape window", "dtype shape", "dtype window")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_sinks_agree_with_the_reference(ops, isa, dtype, shape, window):
    spec, sequences = requests(shape, window)
    for a, e in zip(sequences.run(ops, spec, CUTS), expected(dtype, shape, window), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance(isa, dtype))


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_a_sink_takes_its_share_of_the_softmax(reference, ops, rng):
    """The first token sees one key, with the score q k / sqrt(dim), and its value counts with the rest of the share."""
    shape = SMALL._replace(norms=False)
    heads, kv_heads, dim = shape[:3]
    spec = with_sinks(rng, shape, largest=3.0)
    sequences = Sequences(rng, shape, [1])
    q, k, v = np.split(sequences.qkv[0].reshape(-1, dim), [heads, heads + kv_heads])
    k, v = (np.repeat(one, heads // kv_heads, axis=0) for one in (k, v))
    scores = (q * k).sum(-1) * spec.scale  # a rotation by one angle of both changes nothing
    share = 1 / (1 + np.exp(spec.sinks.numpy() - scores))
    for one in (reference, ops):
        found = sequences.run(one, spec, [[1]])[0].reshape(heads, dim)
        np.testing.assert_allclose(found, v * share[:, None], rtol=0, atol=1e-5)


def test_a_sink_far_above_all_scores_leaves_nothing(ops, rng):
    spec = make_spec(rng, SMALL)._replace(sinks=paddle.full([SMALL.heads], 1e30))
    assert np.abs(Sequences(rng, SMALL, [3]).run(ops, spec, [[3]])[0]).max() < 1e-30


@pytest.mark.covers("isa dtype", "isa window", "dtype window")
@pytest.mark.parametrize("window", [0, 100])
def test_a_request_with_sinks_has_the_same_bits_in_any_batch_cut_and_number_of_threads(ops, threads, rng, window):
    spec, lengths = with_sinks(rng, SMALL, window), [2200, 1500, 90, 64]
    sequences = Sequences(rng, SMALL, lengths)
    together = sequences.run(ops, spec, [[2195, 1, 1, 3], [0, 1500], [89, 1], [64]])
    for cuts in ([2200], [1024, 1024, 152], [2150, *[1] * 50]):
        np.testing.assert_array_equal(sequences.run(ops, spec, [cuts], only=[0])[0], together[0])
    ops.set_num_threads(1)
    for r, length in enumerate(lengths):
        alone = sequences.run(ops, spec, {r: [length - 1, 1]}, only=[r])[0]
        np.testing.assert_array_equal(alone, together[r])


def test_sequences_that_share_keys_have_the_bits_that_they_have_alone(ops, rng):
    """Both sequences are one task, and each continues from the state of the shared keys."""
    spec, shared = with_sinks(rng, SMALL), 640 // SMALL.block_size
    width = (SMALL.heads + 2 * SMALL.kv_heads) * SMALL.dim
    prompt, step = (rng.standard_normal((n, width)).astype(np.float32) for n in (700, 4))
    tables = [[*range(shared), *([40 + r] * 4)] for r in range(4)]
    cache = ops.new_kv_cache(1, 64, SMALL.block_size, SMALL.kv_heads, SMALL.dim)
    for table in tables:
        ops.attention(paddle.to_tensor(prompt), cache, make_batch([0], [700], [table]), spec)
    together = ops.attention(paddle.to_tensor(step), cache, make_batch([700] * 4, [1] * 4, tables), spec).numpy()
    for r, table in enumerate(tables):
        row = paddle.to_tensor(step[r : r + 1])
        alone = ops.attention(row, cache, make_batch([700], [1], [table]), spec).numpy()
        np.testing.assert_array_equal(alone[0], together[r])
