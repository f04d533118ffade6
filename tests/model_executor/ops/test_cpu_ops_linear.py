"""Linears, MLPs and embeddings with packed weights equal the reference. The bits of a row depend on that row only."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.reference import round_to_bfloat16

# (rows, in, out): one row, edges of every tile (16, 32), row blocks and blocks of K (beyond 1 MiB of input), odd sizes.
SHAPES = [
    (1, 64, 32),
    (3, 70, 50),
    (16, 896, 96),
    (17, 33, 17),
    (33, 128, 48),
    (120, 4864, 64),
    (300, 96, 40),
    (600, 1120, 32),
]


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return the type of the weights: int8 beside bfloat16, too."""
    return request.param


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def as_bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return (round_to_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def rounded_like_a_left_operand(x: np.ndarray, dtype: str) -> paddle.Tensor:
    """Round x to bfloat16 as the C++ ops do for bfloat16 weights. Only the order of summation differs then."""
    return paddle.to_tensor(round_to_bfloat16(x) if dtype == "bfloat16" else x)


def assert_close(actual: paddle.Tensor, expected: paddle.Tensor, rtol: float = 1e-4) -> None:
    expected = expected.numpy()
    np.testing.assert_allclose(actual.numpy(), expected, rtol=rtol, atol=rtol * float(np.abs(expected).max()))


@pytest.mark.covers("isa dtype rows", "isa dtype with_bias", "rows with_bias")
@pytest.mark.parametrize("rows,k,n", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_agrees_with_the_reference(ops, reference, dtype, rng, rows, k, n, with_bias):
    x, weight = random(rng, rows, k), random(rng, n, k)
    bias = [random(rng, n)] if with_bias else None
    actual = ops.linear(paddle.to_tensor(x), ops.pack_linear([weight], bias))
    expected = reference.linear(rounded_like_a_left_operand(x, dtype), reference.pack_linear([weight], bias))
    assert_close(actual, expected, 1e-5)


def one_chain(x: np.ndarray, weight: np.ndarray, odd_first: bool) -> np.ndarray:
    """Return x @ weight.T as one chain of fused multiply-adds over k = 0, 1, 2, 3, ... or 1, 0, 3, 2, ... x, weight:
    bfloat16 numbers without large differences of magnitude, so that float64 has every product and sum exactly."""
    order, sums = np.arange(x.shape[1]), np.zeros((len(x), len(weight)), np.float32)
    for k in order ^ 1 if odd_first else order:
        sums = (sums + np.outer(x[:, k].astype(np.float64), weight[:, k].astype(np.float64))).astype(np.float32)
    return sums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows,k,n", [(1, 64, 32), (30, 960, 50)])
def test_sums_are_added_in_the_documented_order(ops, isa, dtype, rng, rows, k, n):
    x, weight = round_to_bfloat16(random(rng, rows, k)), round_to_bfloat16(random(rng, n, k))
    actual = ops.linear(paddle.to_tensor(x), ops.pack_linear([weight]))
    bf16_isa = isa if dtype == "bfloat16" else ""
    expected = one_chain(x, weight, odd_first=bf16_isa == "avx512_bf16")
    if bf16_isa == "amx":  # the order within a tile is the instruction's
        assert_close(actual, paddle.to_tensor(expected), 1e-5)
    else:
        np.testing.assert_array_equal(actual.numpy(), expected)


def test_denormal_numbers_count_as_zero_where_the_instruction_does_so(ops, isa, dtype):
    x, weight = np.full((2, 32), 1e-39, np.float32), np.ones((16, 32), np.float32)
    flushes = dtype == "int8" or (dtype == "bfloat16" and isa in ("avx512_bf16", "amx"))
    found = ops.linear(paddle.to_tensor(x), ops.pack_linear([weight])).numpy()
    np.testing.assert_allclose(found, 0 if flushes else 3.2e-38, rtol=0.05)


@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_mlp_agrees_with_the_reference(ops, reference, dtype, rng, rows, k, n):
    x, parts = random(rng, rows, k) / k**0.5, [random(rng, n, k), random(rng, n, k)]
    down = random(rng, 24, n) / n**0.5
    actual = ops.mlp(paddle.to_tensor(x), ops.pack_linear(parts), ops.pack_linear([down]))
    gate_up, down = reference.pack_linear(parts), reference.pack_linear([down])
    expected = reference.mlp(rounded_like_a_left_operand(x, dtype), gate_up, down)
    # The input of down is rounded, to 16 bits of a group for int8.
    assert_close(actual, expected, {"float32": 1e-5, "int8": 1e-4, "bfloat16": 1e-2}[dtype])


@pytest.mark.parametrize("sizes", [(32, 16, 16), (20, 7, 7), (1, 2, 3)])
def test_stacked_parts_equal_one_weight(ops, rng, sizes):
    x, parts = random(rng, 5, 72), [random(rng, n, 72) for n in sizes]
    bias = [random(rng, n) for n in sizes]
    stacked = ops.linear(paddle.to_tensor(x), ops.pack_linear(parts, bias)).numpy()
    whole = ops.linear(paddle.to_tensor(x), ops.pack_linear([np.concatenate(parts)], [np.concatenate(bias)])).numpy()
    np.testing.assert_array_equal(stacked, whole)


@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize("n", [32, 37])
def test_a_checkpoint_of_the_other_dtype_is_converted_to_nearest_even(ops, rng, k, n):
    weight = random(rng, n, k)
    weight[0, 0] = np.array(0x3F808000, np.uint32).view(np.float32)  # a tie: rounds down to even
    weight[0, 1] = np.array(0x3F818000, np.uint32).view(np.float32)  # a tie: rounds up to even
    x = paddle.to_tensor(random(rng, 2, k))
    from_bits = ops.linear(x, ops.pack_linear([as_bfloat16_bits(weight)])).numpy()
    source = weight if ops.dtype == "bfloat16" else round_to_bfloat16(weight)
    np.testing.assert_array_equal(ops.linear(x, ops.pack_linear([source])).numpy(), from_bits)


def test_source_arrays_may_be_unaligned_and_freed(ops, rng):
    weight = as_bfloat16_bits(random(rng, 48, 64))
    raw = np.empty(weight.nbytes + 1, np.uint8)
    shifted = np.frombuffer(raw.data, np.uint16, weight.size, 1).reshape(weight.shape)
    shifted[:] = weight
    x = paddle.to_tensor(random(rng, 3, 64))
    packed = ops.pack_linear([shifted])
    expected = ops.linear(x, ops.pack_linear([weight])).numpy()
    raw[:] = 255
    np.testing.assert_array_equal(ops.linear(x, packed).numpy(), expected)


@pytest.mark.parametrize("k,n", [(896, 64), (4864, 48), (70, 50)])
def test_a_row_has_the_same_bits_in_any_batch(ops, rng, k, n):
    x = random(rng, 300, k)
    plain = ops.pack_linear([random(rng, n, k)], [random(rng, n)])
    gate_up = ops.pack_linear([random(rng, n, k) / k**0.5, random(rng, n, k) / k**0.5])
    down = ops.pack_linear([random(rng, 40, n)])
    for op, weights in ((ops.linear, [plain]), (ops.mlp, [gate_up, down])):
        together = op(paddle.to_tensor(x), *weights).numpy()
        for first, rows in ((0, 1), (7, 1), (299, 1), (20, 8), (100, 17), (50, 64), (31, 130)):
            np.testing.assert_array_equal(
                op(paddle.to_tensor(x[first : first + rows]), *weights).numpy(), together[first : first + rows]
            )


@pytest.mark.parametrize("rows", [1, 40, 200])
def test_bits_do_not_depend_on_the_number_of_threads(ops, rng, threads, rows):
    x, weight = paddle.to_tensor(random(rng, rows, 1120)), ops.pack_linear([random(rng, 208, 1120)])
    results = []
    for count in (1, 2, 3, 7):
        ops.set_num_threads(count)
        results += [ops.linear(x, weight).numpy(), ops.linear(x, weight).numpy()]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("k", [96, 70])  # 70: the last k tile of a row is part padding, not the next row
def test_a_row_with_nan_leaves_its_neighbours_alone(ops, rng, k):
    x, weight = random(rng, 40, k), ops.pack_linear([random(rng, 64, k)])
    clean = ops.linear(paddle.to_tensor(x), weight).numpy()
    x[5, 3], x[20, 0] = np.nan, np.inf
    dirty = ops.linear(paddle.to_tensor(x), weight).numpy()
    assert np.isnan(dirty[5]).all() and not np.isfinite(dirty[20]).any()
    others = np.setdiff1d(np.arange(40), [5, 20])
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.mark.parametrize("k,n", [(64, 50), (70, 33), (896, 257)])
def test_embedding_returns_the_rows_of_the_packed_weight(ops, reference, rng, k, n):
    weight, ids = random(rng, n, k), np.array([0, n - 1, 5, 5, 17], np.int32)
    actual = ops.embedding(ids, ops.pack_linear([weight]))
    np.testing.assert_array_equal(actual.numpy(), reference.embedding(ids, reference.pack_linear([weight])).numpy())


def test_packed_weights_take_the_bytes_of_the_checkpoint(ops, dtype, rng):
    size = {"float32": 4, "bfloat16": 2, "int8": 2 + 4 / 3 + 1 / 12}[
        dtype
    ]  # int8: 96 columns are 2 groups, with scales
    assert ops.pack_linear([random(rng, 160, 96)]).nbytes == 160 * 96 * size
    assert ops.pack_linear([random(rng, 160, 96)], [random(rng, 160)]).nbytes == 160 * 96 * size + 160 * 4


@pytest.mark.covers("isa dtype source", "isa dtype k", "isa dtype sizes", "source k sizes")
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [64, 70, 33])
@pytest.mark.parametrize("sizes", [(32, 16, 16), (20, 7, 7), (50,)])
def test_unpacking_gives_back_the_bits_that_were_packed(ops, reference, rng, source, k, sizes):
    parts, bias = [random(rng, n, k) for n in sizes], [random(rng, n) for n in sizes]
    if source == "bfloat16":
        parts = [as_bfloat16_bits(part) for part in parts]
    packed, by_reference = ops.pack_linear(parts, bias), reference.pack_linear(parts, bias)
    rows = ops.unpack_linear(packed)
    assert rows.dtype == (np.uint16 if ops.dtype == "bfloat16" else np.float32) and rows.shape == (sum(sizes), k)
    if source == ops.dtype:
        np.testing.assert_array_equal(rows, np.concatenate(parts))
    np.testing.assert_array_equal(rows, reference.unpack_linear(by_reference))
    for unpacked in (ops.unpack_bias(packed), reference.unpack_bias(by_reference)):
        np.testing.assert_array_equal(unpacked, np.concatenate(bias))
    again = ops.pack_linear([rows], [ops.unpack_bias(packed)])
    np.testing.assert_array_equal(ops.unpack_linear(again), rows)
    x = paddle.to_tensor(random(rng, 3, k))
    np.testing.assert_array_equal(ops.linear(x, again).numpy(), ops.linear(x, packed).numpy())


def test_any_range_of_rows_can_be_unpacked_and_belongs_to_the_caller(ops, reference, rng):
    weight = random(rng, 50, 40)
    for either in (ops, reference):
        packed = either.pack_linear([weight])
        whole = either.unpack_linear(packed)
        assert either.unpack_bias(packed) is None
        for first, last in ((0, 1), (15, 17), (16, 32), (49, 50), (3, 50), (7, 7)):
            piece = either.unpack_linear(packed, first, last)
            np.testing.assert_array_equal(piece, whole[first:last])
            piece[:] = 0
        np.testing.assert_array_equal(either.unpack_linear(packed), whole)
