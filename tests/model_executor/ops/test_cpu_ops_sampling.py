"""Sampling and logprobs: the same tokens as the reference, and each row independent of the others."""

from __future__ import annotations

from functools import cache

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenMasks

pytestmark = pytest.mark.by_width

# top_k, top_p, min_p
FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.05, 0.0), (50, 0.8, 0.0), (0, 1.0, 0.05),
           (30, 0.95, 0.02), (5000, 0.999, 0.0)]  # fmt: skip


@pytest.fixture
def dtype() -> str:
    """Return one dtype: these ops do not depend on the dtype of the weights."""
    return "float32"


def make_batch(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5) -> SampleBatch:
    def fill(value, kind) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, kind), rows).copy()

    return SampleBatch(
        fill(temperature, np.float32), fill(top_k, np.int32), fill(top_p, np.float32), fill(min_p, np.float32),
        fill(uniform, np.float64),
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 7, 100, 5003, 151936])
def test_greedy_takes_the_lowest_of_the_best(ops, rng, vocab):
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    logits[1] = 2.5  # all equal
    logits[2, [vocab // 2, vocab - 1]] = 100.0  # a tie
    drawn = ops.sample(paddle.to_tensor(logits), make_batch(5, temperature=0.0))
    np.testing.assert_array_equal(drawn, logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(ops, rng, temperature):
    logits = rng.standard_normal((20, 1000)).astype(np.float32)
    for filters in FILTERS:
        drawn = ops.sample(paddle.to_tensor(logits), make_batch(20, temperature, *filters, rng.random(20)))
        np.testing.assert_array_equal(drawn, logits.argmax(1))


@cache
def drawn_by_reference(temperature: float, *filters: float) -> tuple[paddle.Tensor, SampleBatch, np.ndarray]:
    """Return 400 rows of logits, their sampling parameters and the draws of the reference, for all instruction sets."""
    rng, rows, vocab = np.random.default_rng(20261120), 400, 3001
    logits = paddle.to_tensor((rng.standard_normal((rows, vocab)) * 3).astype(np.float32))
    batch = make_batch(rows, temperature, *filters, rng.random(rows))
    return logits, batch, ReferenceOps("float32").sample(logits, batch)


@pytest.mark.covers("isa top_k top_p min_p", "isa temperature")
@pytest.mark.parametrize("top_k,top_p,min_p", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draws_agree_with_the_reference(ops, top_k, top_p, min_p, temperature):
    """Rounding can move a uniform that lies at the edge of two tokens to the other one: at most 1 of 400."""
    logits, batch, wanted = drawn_by_reference(temperature, top_k, top_p, min_p)
    assert (ops.sample(logits, batch) != wanted).sum() <= 1


@pytest.mark.parametrize("spread", [0.001, 1.0, 30.0])
def test_draws_agree_with_the_reference_on_a_whole_vocabulary(ops, reference, rng, spread):
    rows, vocab = 12, 151936
    logits = paddle.to_tensor((rng.standard_normal((rows, vocab)) * spread).astype(np.float32))
    batch = make_batch(rows, 1.0, [0, 0, 20, 100000] * 3, [1.0, 0.9, 0.95, 0.5] * 3, 0.0, rng.random(rows))
    assert (ops.sample(logits, batch) != reference.sample(logits, batch)).sum() <= 1


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids(ops, reference):
    logits = np.zeros((64, 100), np.float32)
    logits[:, 90] = 1.0
    batch = make_batch(64, top_k=5, uniform=np.linspace(0.001, 0.999, 64))
    drawn = ops.sample(paddle.to_tensor(logits), batch)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 90}
    np.testing.assert_array_equal(drawn, reference.sample(paddle.to_tensor(logits), batch))


def test_top_p_stops_at_the_token_that_reaches_it(ops):
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)).repeat(200, 0)
    for top_p, kept in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        batch = make_batch(200, top_p=top_p, uniform=np.linspace(0, 0.9999, 200))
        assert set(ops.sample(paddle.to_tensor(logits), batch).tolist()) == kept


def test_masked_logits_are_never_drawn(ops, rng):
    logits = rng.standard_normal((200, 1000)).astype(np.float32)
    logits[:, ::2] = -np.inf
    for uniform in (0.0, 1 - 1e-16):
        for filters in FILTERS:
            drawn = ops.sample(paddle.to_tensor(logits), make_batch(200, 1.0, *filters, uniform))
            assert (drawn % 2 == 1).all()


@pytest.mark.parametrize("vocab", [5, 100, 3001])
def test_a_mask_draws_as_logits_of_minus_infinity_do(ops, reference, rng, vocab):
    logits = rng.standard_normal((60, vocab)).astype(np.float32)
    rows, allowed = np.arange(0, 60, 2), rng.random((30, vocab)) < 0.3
    allowed[0], allowed[1], allowed[2:4, 1:] = True, False, False
    bits = np.zeros((30, -(-vocab // 32) + 1), np.uint32)
    packed = np.packbits(allowed, axis=1, bitorder="little")
    bits.view(np.uint8)[:, : packed.shape[1]] = packed
    masked = logits.copy()
    masked[rows] = np.where(allowed, logits[rows], -np.inf)
    before = paddle.to_tensor(logits)
    for temperature, filters in [(0.0, FILTERS[0]), *((1.3, filters) for filters in FILTERS)]:
        batch = make_batch(60, temperature, *filters, rng.random(60))
        drawn = ops.sample(before, batch, masks=TokenMasks(rows, bits))
        np.testing.assert_array_equal(drawn, ops.sample(paddle.to_tensor(masked), batch))
        assert (
            drawn[rows[1]] == -1 and (reference.sample(before, batch, masks=TokenMasks(rows, bits)) != drawn).sum() <= 1
        )
    np.testing.assert_array_equal(before.numpy(), logits)


def test_frequencies_follow_the_distribution(ops, rng):
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)[None].repeat(4000, 0)
    drawn = ops.sample(paddle.to_tensor(logits), make_batch(4000, uniform=(np.arange(4000) + 0.5) / 4000))
    np.testing.assert_array_equal(np.bincount(drawn), probabilities * 4000)


def test_a_row_draws_the_same_in_any_batch(ops, rng, threads):
    rows = 33
    logits = rng.standard_normal((rows, 20011)).astype(np.float32)
    batch = make_batch(rows, 0.9, rng.integers(0, 50, rows), rng.uniform(0.5, 1, rows), 0.01, rng.random(rows))
    together = ops.sample(paddle.to_tensor(logits), batch)
    chosen = ops.logprobs(paddle.to_tensor(logits), LogprobBatch(together, 5))
    ops.set_num_threads(1)
    for r in range(rows):
        alone = SampleBatch(*(field[r : r + 1] for field in batch))
        assert ops.sample(paddle.to_tensor(logits[r : r + 1]), alone)[0] == together[r]
        by_itself = ops.logprobs(paddle.to_tensor(logits[r : r + 1]), LogprobBatch(together[r : r + 1], 5))
        for all_rows, row in zip(chosen[:4], by_itself[:4], strict=True):
            np.testing.assert_array_equal(all_rows[r], row[0])


@pytest.mark.parametrize("vocab,top", [(5, 5), (1000, 0), (1000, 20), (5003, 100), (5003, 5003), (151936, 256)])
def test_logprobs_agree_with_the_reference(ops, reference, rng, vocab, top):
    logits = (rng.standard_normal((6, vocab)) * 4).astype(np.float32)
    logits[2] = np.round(logits[2])  # many ties
    logits[3, 0] = -np.inf
    ids = rng.integers(0, vocab, 6).astype(np.int32)
    actual = ops.logprobs(paddle.to_tensor(logits), LogprobBatch(ids, top))
    expected = reference.logprobs(paddle.to_tensor(logits), LogprobBatch(ids, top))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_array_equal(actual.ranks, expected.ranks)


@pytest.mark.parametrize("top_k,top_p,min_p", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.7])
def test_logprobs_over_what_a_draw_kept_agree_with_the_reference(ops, reference, rng, temperature, top_k, top_p, min_p):
    """The logprobs of the tokens that a draw kept are those of a distribution."""
    rows, vocab = 12, 3001
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[1], logits[2, ::2] = np.round(logits[1]), -np.inf
    batch = make_batch(rows, temperature, top_k, top_p, min_p, rng.random(rows))
    cutoff, expected_cutoff = Cutoff.empty(rows), Cutoff.empty(rows)
    drawn = ops.sample(paddle.to_tensor(logits), batch, cutoff)
    reference.sample(paddle.to_tensor(logits), batch, expected_cutoff)
    kept = [cutoff.kept(i, row) for i, row in enumerate(logits)]
    for i, row in enumerate(logits):  # sums in another order can move the edge of top_p by a token
        assert len(set(kept[i]) ^ set(expected_cutoff.kept(i, row))) <= 1 and drawn[i] in kept[i]
    ends = np.cumsum([len(ids) for ids in kept])
    divisors = np.full(rows, temperature or 1.0, np.float32)
    asked = LogprobBatch(drawn, 300, divisors, cutoff, np.concatenate(kept).astype(np.int32), ends)
    actual, expected = (own.logprobs(paddle.to_tensor(logits), asked) for own in (ops, reference))
    for name in ("chosen", "top_values", "others"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_array_equal(actual.ranks, expected.ranks)
    for i, part in enumerate(np.split(actual.others, ends[:-1])):
        assert np.exp(part.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
        if len(kept[i]) <= 300:
            assert (
                set(actual.top_ids[i, : len(part)]) == set(kept[i])
                and (actual.top_values[i, len(part) :] == -np.inf).all()
            )


def test_a_token_beyond_the_cutoff_has_no_probability(ops, reference):
    logits = paddle.to_tensor(np.array([[3.0, 1.0, 2.0, 1.0, -np.inf]], np.float32))
    cutoff = Cutoff.empty(1)
    drawn = ops.sample(logits, make_batch(1, top_k=3), cutoff)
    asked = LogprobBatch(drawn, 5, None, cutoff, np.arange(5, dtype=np.int32), np.array([5]))
    for found in (own.logprobs(logits, asked) for own in (ops, reference)):
        assert (found.others > -np.inf).tolist() == [True, True, True, False, False]
        assert found.top_ids.tolist() == [[0, 2, 1, 0, 0]] and (found.top_values[0, 3:] == -np.inf).all()


def spoiled(rng, vocab: int) -> tuple[np.ndarray, list[bool]]:
    """Return 40 rows of logits and whether each is finite. Bad values lie at the start, inside and end of vectors."""
    logits = (rng.standard_normal((40, vocab)) * 3).astype(np.float32)
    logits[0, : vocab // 2] = -np.inf  # bans are fine
    places = [0, vocab - 1, vocab // 2, min(15, vocab - 1), min(16, vocab - 1), vocab // 3]
    for k, row in enumerate(range(1, 40, 2)):
        logits[row, places[k % len(places)]] = [np.nan, np.inf][k % 2]
    logits[3], logits[5] = -np.inf, np.nan
    logits[7, 1:] = -np.inf  # one NaN, all others -inf
    logits[7, 0] = np.nan
    return logits, [row % 2 == 0 for row in range(40)]


@pytest.mark.parametrize("vocab", [7, 100, 5003])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing_and_the_others_draw_as_without_it(
    ops, reference, rng, vocab, filters, temperature
):
    logits, finite = spoiled(rng, vocab)
    batch = make_batch(40, temperature, *filters, rng.random(40))
    drawn = ops.sample(paddle.to_tensor(logits), batch)
    np.testing.assert_array_equal(drawn >= 0, finite)
    np.testing.assert_array_equal(drawn < 0, reference.sample(paddle.to_tensor(logits), batch) < 0)
    alone = SampleBatch(*(field[finite] for field in batch))
    np.testing.assert_array_equal(drawn[finite], ops.sample(paddle.to_tensor(logits[finite]), alone))


@pytest.mark.parametrize("vocab", [7, 100, 5003])
def test_a_row_that_is_not_finite_has_a_logprob_of_nan_and_the_others_as_without_it(ops, reference, rng, vocab):
    logits, finite = spoiled(rng, vocab)
    ids = rng.integers(0, vocab, 40).astype(np.int32)
    told = ops.logprobs(paddle.to_tensor(logits), LogprobBatch(ids, 5))
    np.testing.assert_array_equal(~np.isnan(told[0]), finite)
    expected = reference.logprobs(paddle.to_tensor(logits), LogprobBatch(ids, 5))
    np.testing.assert_array_equal(np.isnan(told.chosen), np.isnan(expected.chosen))
    without = ops.logprobs(paddle.to_tensor(logits[finite]), LogprobBatch(ids[finite], 5))
    for all_rows, alone in zip(told[:4], without[:4], strict=True):
        np.testing.assert_array_equal(all_rows[finite], alone)
