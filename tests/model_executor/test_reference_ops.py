"""The reference ops compared with formulas in numpy float64. The bits of a row do not depend on other rows."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.blocks import AttentionSpec
from fastdeploy.model_executor.ops.interface import AdapterRows, AttentionBatch, LoraPart, PackedAdapter, SampleBatch
from fastdeploy.model_executor.ops.reference import ReferenceOps, round_to_bfloat16
from fastdeploy.model_executor.ops.reference_weights import to_float32
from fastdeploy.model_executor.ops.vocabulary import LogprobBatch
from tests.support.decoder_layers import SHAPES, Adapter, Layer, make_batch

OPS = ReferenceOps("float32")
HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 6, 2, 16, 4, 150


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _tensor(*shape: int, seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(_normal(*shape, seed=seed))


def test_rounding_to_bfloat16_is_to_nearest_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 0.0, np.inf, -np.inf, 3.4e38], np.float32)
    expected = [1.0, 1 + 2**-6, -1 - 2**-7, 0.0, np.inf, -np.inf, np.inf]
    assert round_to_bfloat16(values).tolist() == expected
    assert np.isnan(round_to_bfloat16(np.array([np.nan], np.float32))[0])
    assert to_float32(np.array([0x3FC0, 0xC010], np.uint16)).tolist() == [1.5, -2.25]


def test_linears_and_embedding_share_one_packed_weight():
    parts, bias = [_normal(30, 64), _normal(34, 64, seed=1)], [_normal(30, seed=2), _normal(34, seed=3)]
    stacked, x = np.concatenate(parts).astype(np.float64), _normal(5, 64, seed=4)
    weight, biased = OPS.pack_linear(parts), OPS.pack_linear(parts, bias)
    y = x @ stacked.T
    np.testing.assert_allclose(OPS.linear(paddle.to_tensor(x), weight).numpy(), y, rtol=1e-4, atol=1e-5)
    with_bias = OPS.linear(paddle.to_tensor(x), biased).numpy()
    np.testing.assert_allclose(with_bias, y + np.concatenate(bias), rtol=1e-4, atol=1e-5)
    gate, up = np.split(y, 2, axis=1)
    down = _normal(6, 32, seed=9)
    mlp = OPS.mlp(paddle.to_tensor(x), weight, OPS.pack_linear([down])).numpy()
    np.testing.assert_allclose(mlp, (gate / (1 + np.exp(-gate)) * up) @ down.T, rtol=1e-3, atol=1e-3)
    gathered = OPS.embedding(np.array([33, 0], np.int32), weight).numpy()
    assert np.array_equal(gathered, stacked[[33, 0]].astype(np.float32))
    assert (weight.out_features, weight.in_features, weight.nbytes) == (64, 64, 64 * 64 * 4)


def test_bfloat16_ops_round_weights_once_and_compute_in_float32():
    ops, part = ReferenceOps("bfloat16"), _normal(8, 16)
    row = ops.embedding(np.array([3], np.int32), ops.pack_linear([part])).numpy()[0]
    assert np.array_equal(row, round_to_bfloat16(part[3]))


def test_norm_and_logits():
    x, weight, head = _tensor(7, 48), _tensor(48, seed=2), _normal(9, 48, seed=1)
    exact = x.numpy().astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight.numpy()
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-5).numpy(), expected, rtol=1e-5, atol=1e-6)
    logits = OPS.logits(x, weight, 1e-5, OPS.pack_linear([head])).numpy()
    np.testing.assert_allclose(logits, expected @ head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["linear", "mlp", "rms_norm"])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(op):
    x, weight = _normal(133, 64), OPS.pack_linear([_normal(70, 64, seed=1)])
    down = OPS.pack_linear([_normal(20, 35, seed=3)])
    arguments = {"linear": (weight,), "mlp": (weight, down), "rms_norm": (_tensor(64, seed=2), 1e-6)}[op]
    whole = getattr(OPS, op)(paddle.to_tensor(x), *arguments).numpy()
    for first, last in ((0, 1), (1, 2), (5, 23), (16, 48), (132, 133)):
        part = getattr(OPS, op)(paddle.to_tensor(x[first:last]), *arguments).numpy()
        assert np.array_equal(part, whole[first:last]), (first, last)


ALL_LINEARS = {"qkv": [8, None, 4], "o": [3], "gate_up": [None, 5], "down": [16]}


def _rows(adapters: list[PackedAdapter], rows: list[int]) -> AdapterRows:
    return AdapterRows(adapters, np.array(rows, np.int32))


@pytest.mark.parametrize("shape", ["small", "odd"])
def test_a_row_with_an_adapter_is_computed_as_if_its_product_were_added_to_the_weights(shape):
    rng, lengths, own = np.random.default_rng(3), [7, 1, 20, 4], [1, -1, 0, 2]
    layer = Layer(rng, *SHAPES[shape])
    adapters = [Adapter(rng, layer, ranks) for ranks in (ALL_LINEARS, {"o": [2]}, {"gate_up": [1, 64]})]
    x, keep = paddle.to_tensor(_normal(sum(lengths), layer.hidden)), np.array([0, 6, 7, 9, 27, 31])
    batch, rows = make_batch([0, 1, 2, 3], [0] * 4, lengths), np.repeat(own, lengths)
    mixed = _rows([adapter.on(OPS) for adapter in adapters], rows.tolist())
    for picked in (None, keep):
        found = OPS.decoder_layers(x.clone(), [layer.on(OPS)], layer.cache(OPS, 4), batch, picked, adapters=mixed)
        kept_rows = rows if picked is None else rows[picked]
        for index, weights in enumerate([*(adapter.merged() for adapter in adapters), layer]):
            mine = kept_rows == (index if index < 3 else -1)
            whole = OPS.decoder_layers(x.clone(), [weights.on(OPS)], layer.cache(OPS, 4), batch, picked).numpy()
            np.testing.assert_allclose(found.numpy()[mine], whole[mine], rtol=1e-3, atol=1e-3)
            if index == 3:
                np.testing.assert_array_equal(found.numpy()[mine], whole[mine])


def test_the_adapter_of_the_head_adds_to_the_logits_of_its_rows():
    x, norm, head = _normal(5, 48), _tensor(48, seed=2), _normal(9, 48, seed=1)
    part, weight = LoraPart(_normal(3, 48, seed=5), _normal(9, 3, seed=6), 0.25), OPS.pack_linear([head])
    lora = OPS.pack_lora([part], [9], 48)
    assert (lora.out_features, lora.in_features, lora.rank, lora.nbytes) == (9, 48, 3, 4 * 3 * 57)
    rows = _rows([PackedAdapter((), lora, 0), PackedAdapter((), None, 0)], [-1, 0, 0, 1, -1])
    base = OPS.logits(paddle.to_tensor(x), norm, 1e-5, weight).numpy()
    found = OPS.logits(paddle.to_tensor(x), norm, 1e-5, weight, rows).numpy()
    normed = OPS.rms_norm(paddle.to_tensor(x), norm, 1e-5).numpy().astype(np.float64)
    np.testing.assert_allclose((found - base)[1:3], normed[1:3] @ part.a.T @ part.b.T * 0.25, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[[0, 3, 4]], base[[0, 3, 4]])


def test_a_row_with_an_adapter_has_the_same_bits_in_any_batch():
    rng, count = np.random.default_rng(4), 40
    layer = Layer(rng, *SHAPES["small"])
    adapters = [Adapter(rng, layer, ALL_LINEARS).on(OPS) for _ in range(3)]
    x, rows = _normal(count, layer.hidden), [0] * 18 + [-1] * 3 + [2] * 19
    whole = OPS.decoder_layers(
        paddle.to_tensor(x), [layer.on(OPS)], layer.cache(OPS, count), make_batch(list(range(count)), [0] * count,
        [1] * count), adapters=_rows(adapters, rows)
    ).numpy()  # fmt: skip
    for first, last in ((0, 1), (17, 19), (18, 20), (21, 22), (30, 40)):
        n, mine = last - first, _rows(adapters[::-1], [{0: 2, 2: 0, -1: -1}[row] for row in rows[first:last]])
        batch = make_batch(list(range(n)), [0] * n, [1] * n)
        part = OPS.decoder_layers(
            paddle.to_tensor(x[first:last]), [layer.on(OPS)], layer.cache(OPS, n), batch, adapters=mine
        )
        np.testing.assert_array_equal(part.numpy(), whole[first:last])


QKV = _normal(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, seed=5)
ANGLES = np.arange(TOKENS)[:, None] * np.random.default_rng(6).random(DIM // 2)
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
Q_NORM, K_NORM = _normal(DIM, seed=7), _normal(DIM, seed=8)


def _attend(ops: ReferenceOps, chunks: list[int], neighbour: int = 0) -> np.ndarray:
    """Compute the sequence in these chunks, each beside ``neighbour`` rows of another sequence. Returns its rows."""
    spec = AttentionSpec(
        0, HEADS, KV_HEADS, DIM, DIM**-0.5, *map(paddle.to_tensor, (COS, SIN, Q_NORM, K_NORM)), norm_eps=1e-6
    )
    cache = ops.new_kv_cache(1, 128, BLOCK, KV_HEADS, DIM)
    tables = np.random.default_rng(9).permutation(128)[: 2 * 40].reshape(2, 40).astype(np.int32)
    out, done = [], 0
    for count in chunks:
        lengths, starts = ([neighbour, count], [0, done]) if neighbour else ([count], [done])
        batch = AttentionBatch(
            cu_tokens=np.cumsum([0, *lengths]).astype(np.int32),
            starts=np.array(starts, np.int32),
            block_tables=tables[-len(starts) :],
            positions=np.concatenate([np.arange(n) + s for n, s in zip(lengths, starts, strict=True)]).astype(np.int32),
        )
        rows = np.concatenate([QKV[:neighbour], QKV[done : done + count]])
        out.append(ops.attention(paddle.to_tensor(rows), cache, batch, spec).numpy()[neighbour:])
        done += count
    return np.concatenate(out)


def _naive_attention() -> np.ndarray:
    q, k, v = np.split(QKV.reshape(TOKENS, -1, DIM).astype(np.float64), [HEADS, HEADS + KV_HEADS], axis=1)

    def normed_and_rotated(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
        low, high = np.split(x, 2, axis=-1)
        cos, sin = COS[:, None], SIN[:, None]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    q, k = normed_and_rotated(q, Q_NORM), normed_and_rotated(k, K_NORM)
    k, v = np.repeat(k, HEADS // KV_HEADS, 1), np.repeat(v, HEADS // KV_HEADS, 1)
    scores = np.einsum("thd,shd->hts", q, k) * DIM**-0.5
    weights = np.exp(np.where(np.tril(np.ones((TOKENS, TOKENS))) > 0, scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(TOKENS, -1)


def test_attention_is_the_textbook_formula():
    np.testing.assert_allclose(_attend(OPS, [TOKENS]), _naive_attention(), rtol=1e-4, atol=1e-5)
    rounded = _attend(ReferenceOps("bfloat16"), [TOKENS])
    assert 1e-5 < np.abs(rounded - _naive_attention()).max() < 0.05  # only keys and values were rounded


@pytest.mark.parametrize("chunks", [[1] * TOKENS, [7] * 21 + [3], [16] * 9 + [6], [64, 64, 22], [149, 1]], ids=len)
def test_attention_bits_do_not_depend_on_chunks_or_neighbours(chunks):
    whole = _attend(OPS, [TOKENS])
    assert np.array_equal(_attend(OPS, chunks), whole)
    assert np.array_equal(_attend(OPS, chunks, neighbour=33), whole)


def test_blocks_are_copied_in_order_in_every_layer():
    cache = OPS.new_kv_cache(2, 4, BLOCK, KV_HEADS, DIM)
    for i, layer in enumerate((*cache.keys, *cache.values)):
        layer.set_value(np.full(layer.shape, i, np.float32) + np.arange(0, 160, 10, np.float32)[:, None, None])
    OPS.copy_blocks(cache, [0, 3], [3, 1])
    for i, layer in enumerate((*cache.keys, *cache.values)):
        rows = layer.numpy()[:, 0, 0].reshape(4, BLOCK)
        assert np.array_equal(rows[3], rows[0]) and np.array_equal(rows[1], rows[0])
        assert rows[2].tolist() == [80 + i, 90 + i, 100 + i, 110 + i]


def _support(logits: list[float], **settings: float) -> set[int]:
    """Return the ids drawn over a fine grid of uniforms without 0, which may draw a token of any probability."""
    grid = np.linspace(0, 1, 4000, endpoint=False)[1:]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    batch = SampleBatch(**{k: np.full(len(grid), v) for k, v in values.items()}, uniform=grid)
    rows = paddle.to_tensor(np.tile(np.array(logits, np.float32), (len(grid), 1)))
    return set(OPS.sample(rows, batch).tolist())


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.0}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 4}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),  # 0.4 of 0.85 is below half
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"top_k": 2, "min_p": 0.9}, {1}),
    ],
)
def test_truncation_keeps_these_tokens(settings, kept):
    assert _support(np.log(PROBABILITIES).tolist(), **settings) == kept


def test_draws_invert_the_cumulative_sum_in_id_order():
    edges = np.array([0.05, 0.3, 0.52, 0.7, 0.999999])
    batch = SampleBatch(np.ones(5), np.zeros(5, np.int32), np.ones(5), np.zeros(5), edges)
    rows = paddle.to_tensor(np.tile(np.log(PROBABILITIES).astype(np.float32), (5, 1)))
    assert OPS.sample(rows, batch).tolist() == [0, 1, 2, 3, 4]


def test_temperature_sharpens_and_a_tie_goes_to_the_lowest_id():
    tie = paddle.to_tensor(np.array([[1.0, 3.0, 3.0]], np.float32))
    one = SampleBatch(np.zeros(1), np.zeros(1, np.int32), np.ones(1), np.zeros(1), np.zeros(1))
    assert OPS.sample(tie, one).tolist() == [1]
    assert _support([0.0, 1.0], temperature=0.01) == {1}


def test_tokens_of_probability_zero_are_never_drawn():
    assert _support([-np.inf, 1.0, -np.inf, 1.0, -np.inf]) == {1, 3}


def test_logprobs_are_log_softmax_best_first():
    logits, chosen = _normal(3, 40), np.array([0, 39, 7], np.int32)
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    values, best, ids, ranks, _ = OPS.logprobs(paddle.to_tensor(logits), LogprobBatch(chosen, 4))
    np.testing.assert_allclose(values, log_softmax[np.arange(3), chosen], atol=1e-5)
    assert np.array_equal(ids, np.argsort(-logits, axis=-1)[:, :4])
    np.testing.assert_allclose(best, np.take_along_axis(log_softmax, ids.astype(np.int64), -1), atol=1e-5)
    assert ranks.tolist() == [1 + (row > row[token]).sum() for row, token in zip(logits, chosen, strict=True)]
    assert OPS.logprobs(paddle.to_tensor(logits), LogprobBatch(chosen)).top_values.shape == (3, 0)
