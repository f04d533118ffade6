"""Latent attention equals the reference, which equals attention without absorbed weights. The bits of a row are the
same alone, in a batch and in any chunks."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.reference import ReferenceOps
from tests.support.decoder_layers import BLOCK, make_batch
from tests.support.latent_layers import SHAPES, LatentLayer


@pytest.fixture(params=SHAPES)
def layer(request, rng) -> LatentLayer:
    return LatentLayer(rng, *SHAPES[request.param])


def rms_norm(x: np.ndarray, weight: paddle.Tensor) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight.numpy()


def rotated(layer: LatentLayer, x: np.ndarray) -> np.ndarray:
    """Rotate x [T, heads, rotary] at positions 0 to T - 1."""
    cos, sin = (table.numpy()[: len(x), None] for table in layer.rope)
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if layer.interleaved else (x[..., :half], x[..., half:])
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def with_keys_and_values(layer: LatentLayer, residual: np.ndarray) -> np.ndarray:
    """Compute the block on the tokens of one sequence in float64, with the keys and values of all heads."""
    weights = {name: weight.astype(np.float64) for name, weight in layer.weights.items()}
    x = rms_norm(residual.astype(np.float64), layer.norms["norm"])
    latent, key = np.split(x @ weights["kv_a"].T, [layer.latent], axis=1)
    kv = rms_norm(latent, layer.norms["kv_norm"]) @ weights["kv_b"].T
    k, v = np.split(kv.reshape(len(x), layer.heads, -1), [layer.plain], axis=2)
    k = np.concatenate([k, rotated(layer, key[:, None]).repeat(layer.heads, axis=1)], axis=2)
    inner = rms_norm(x @ weights["q_a"].T, layer.norms["q_norm"]) if layer.inner else x
    q = (inner @ weights["q"].T).reshape(len(x), layer.heads, -1)
    q = np.concatenate([q[..., : layer.plain], rotated(layer, q[..., layer.plain :])], axis=2)
    scores = np.einsum("thd,shd->hts", q, k) * (layer.plain + layer.rotary) ** -0.5
    scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    return residual + np.einsum("hts,shd->thd", probabilities, v).reshape(len(x), -1) @ weights["o"].T


def test_the_reference_is_attention_over_the_keys_and_values_of_all_heads(rng, layer):
    ops, x = ReferenceOps("float32"), rng.standard_normal((75, layer.hidden)).astype(np.float32)
    found = ops.decoder_layers(
        paddle.to_tensor(x), [layer.on(ops)], layer.cache(ops, 1), make_batch([0], [0], [75])
    ).numpy()
    np.testing.assert_allclose(found, with_keys_and_values(layer, x), rtol=0, atol=2e-5)


@pytest.mark.covers("isa dtype layer", "isa dtype lengths", "layer lengths")
@pytest.mark.parametrize("lengths", [[1], [5, 1, 40], [1] * 33, [130, 1]])
def test_the_block_agrees_with_the_reference(ops, reference, dtype, rng, layer, lengths):
    batch = make_batch(list(range(len(lengths))), [0] * len(lengths), lengths)
    x = rng.standard_normal((sum(lengths), layer.hidden)).astype(np.float32)
    found = [
        one.decoder_layers(paddle.to_tensor(x), [layer.on(one)], layer.cache(one, len(lengths)), batch).numpy()
        for one in (ops, reference)
    ]
    if dtype == "float32":
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)
    else:  # inputs of linears, queries and probabilities are rounded to 8 bits
        difference = np.abs(found[0] - found[1])
        assert difference.max() < 0.1 and difference.mean() < 0.01


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_sequence_has_the_same_bits_alone_among_many_and_in_any_chunks(ops, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((8 * 70, layer.hidden)).astype(np.float32)
    together = ops.decoder_layers(
        paddle.to_tensor(x), [packed], layer.cache(ops, 8), make_batch(list(range(8)), [0] * 8, [70] * 8)
    ).numpy()
    for sequence in (0, 5):
        mine, cache, parts = x[sequence * 70 : sequence * 70 + 70], layer.cache(ops, 1), []
        for start, length in ((0, 41), (41, 1), (42, 28)):
            part = paddle.to_tensor(mine[start : start + length])
            parts.append(ops.decoder_layers(part, [packed], cache, make_batch([0], [start], [length])).numpy())
        np.testing.assert_array_equal(np.concatenate(parts), together[sequence * 70 : sequence * 70 + 70])


def test_selected_rows_equal_those_of_the_whole_batch_and_the_cache_is_complete(ops, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((50, layer.hidden)).astype(np.float32)
    caches, batch, rows = [layer.cache(ops, 2) for _ in range(2)], make_batch([0, 1], [0, 0], [30, 20]), [7, 29, 49]
    whole = ops.decoder_layers(paddle.to_tensor(x), [packed], caches[0], batch).numpy()
    some = ops.decoder_layers(paddle.to_tensor(x), [packed], caches[1], batch, np.array(rows, np.int64)).numpy()
    np.testing.assert_array_equal(some, whole[rows])
    later, step = make_batch([0, 1], [30, 20], [1, 1]), rng.standard_normal((2, layer.hidden)).astype(np.float32)
    found = [ops.decoder_layers(paddle.to_tensor(step), [packed], cache, later).numpy() for cache in caches]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_token_that_is_not_finite_changes_no_earlier_token_and_no_other_sequence(ops, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((80, layer.hidden)).astype(np.float32)
    batch = make_batch([0, 1], [0, 0], [70, 10])
    clean = ops.decoder_layers(paddle.to_tensor(x), [packed], layer.cache(ops, 2), batch).numpy()
    x[37] = np.inf
    dirty = ops.decoder_layers(paddle.to_tensor(x), [packed], layer.cache(ops, 2), batch).numpy()
    assert np.isnan(dirty[37:70]).all()
    np.testing.assert_array_equal(np.delete(dirty, range(37, 70), 0), np.delete(clean, range(37, 70), 0))
    # A block of the cache is used again: what an earlier sequence left there changes nothing.
    used = layer.cache(ops, 2)
    ops.decoder_layers(paddle.to_tensor(x), [packed], used, batch)
    x[37] = 0
    again = ops.decoder_layers(paddle.to_tensor(x[:10]), [packed], used, make_batch([0], [0], [10])).numpy()
    np.testing.assert_array_equal(again, clean[:10])


def test_copied_blocks_hold_the_same_keys_in_every_layer(ops, reference, rng):
    layer = LatentLayer(rng, *SHAPES["small"])
    for one in (ops, reference):
        packed, x = layer.on(one), rng.standard_normal((17, layer.hidden)).astype(np.float32)
        cache = layer.cache(one, 2)
        one.decoder_layers(paddle.to_tensor(x[:16]), [packed], cache, make_batch([0], [0], [16]))
        one.copy_blocks(cache, [0], [16])
        last = [
            one.decoder_layers(paddle.to_tensor(x[16:]), [packed], cache, make_batch([s], [16], [1])) for s in (0, 1)
        ]
        np.testing.assert_array_equal(last[0].numpy(), last[1].numpy())


def test_a_cache_of_keys_takes_half_the_memory(ops, reference):
    for one in (ops, reference):
        both, keys = (one.new_kv_cache(2, 8, BLOCK, 1, 96, keys_only=only).nbytes for only in (False, True))
        assert both == 2 * keys == 2 * 2 * 8 * BLOCK * 96 * (2 if one.dtype == "bfloat16" and one is ops else 4)
