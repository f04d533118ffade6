"""int8 values of weights: how they are rounded, when they are made, and that products with them have the same bits at
every instruction set."""

from __future__ import annotations

from functools import cache

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.interface import INT8_GROUP, AdapterRows, PackedAdapter
from fastdeploy.model_executor.ops.reference import ReferenceOps, round_to_bfloat16
from tests.support.decoder_layers import SHAPES, Adapter, Layer

NEVER = np.zeros(1, np.int32)


@pytest.fixture
def dtype() -> str:
    """Return the one dtype that has int8 values."""
    return "bfloat16"


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return round_to_bfloat16(rng.standard_normal(shape).astype(np.float32))


def rows_of(ops, weight) -> np.ndarray:
    """Return what products use of a weight without a bias: those with the rows of the unit matrix."""
    return ops.linear(paddle.eye(weight.in_features), weight).numpy().T


def rounded(weight: np.ndarray) -> np.ndarray:
    """Return what the int8 values of a weight [N, K] stand for."""
    n, k = weight.shape
    groups = np.pad(weight, [(0, 0), (0, -k % INT8_GROUP)]).reshape(n, -1, INT8_GROUP).astype(np.float32)
    peak = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-30))
    steps = np.rint(groups * (np.float32(127) / peak))
    return (steps.astype(np.float64) * peak / 127).reshape(n, -1)[:, :k]


@pytest.mark.parametrize("n,k", [(16, 64), (37, 70), (200, 896), (3, 1)])
def test_a_weight_is_rounded_to_127_steps_of_the_largest_of_each_group(ops, reference, rng, n, k):
    weight = random(rng, n, k) * np.exp2(rng.integers(-20, 20, (n, 1))).astype(np.float32)
    for one in (ops, reference):
        packed = one.pack_linear([weight])
        np.testing.assert_array_equal(rows_of(one, packed), weight)
        one.quantize([packed], NEVER)
        np.testing.assert_allclose(rows_of(one, packed), rounded(weight), rtol=1e-6)


def test_a_product_has_the_precision_of_inputs_of_16_bits(ops, rng):
    """The sum of a group is exact. So an error is at most half a step of an input: 2^-16 of its group."""
    x, weight = rng.standard_normal((9, 896)).astype(np.float32), random(rng, 48, 896)
    packed = ops.pack_linear([weight])
    ops.quantize([packed], NEVER)
    found, exact = ops.linear(paddle.to_tensor(x), packed).numpy(), x.astype(np.float64) @ rounded(weight).T
    step = np.abs(x).max() / 32512
    assert np.abs(found - exact).max() < step / 2 * np.abs(weight).sum(1).max() * 0.1  # errors have both signs
    assert np.abs(found - exact).max() > 0


def test_the_largest_sums_do_not_overflow(ops):
    for sign in (1, -1):
        packed = ops.pack_linear([np.full((32, 256), sign, np.float32)])
        ops.quantize([packed], NEVER)
        np.testing.assert_allclose(ops.linear(paddle.ones([3, 256]), packed).numpy(), sign * 256.0, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 2.0**-110, 2.0**-149])
def test_a_group_without_a_normal_magnitude_counts_as_zero(ops, reference, rng, value):
    x = np.full((2, 128), value, np.float32)
    x[:, 64:] = rng.standard_normal(64)
    weight = np.full((20, 128), value, np.float32)
    weight[:, :64] = 1
    weight[:, 64] = 2.0
    for one in (ops, reference):
        packed = one.pack_linear([weight])
        one.quantize([packed], NEVER)
        found = one.linear(paddle.to_tensor(x), packed).numpy()
        np.testing.assert_allclose(found, 2.0 * np.broadcast_to(x[:, 64:65], (2, 20)), rtol=1e-4)


def test_int8_values_follow_a_change_only_when_they_are_made_anew(ops, reference, rng):
    """Staging changes a weight first, and makes the int8 values of the complete weight."""
    first, second = random(rng, 40, 96), random(rng, 40, 96)
    for one in (ops, reference):
        packed, other = one.pack_linear([first]), one.pack_linear([second])
        one.quantize([packed], NEVER)
        before = rows_of(one, packed)
        one.copy_rows(packed, other, 0, 40)
        np.testing.assert_array_equal(rows_of(one, packed), before)
        np.testing.assert_array_equal(one.unpack_linear(packed), one.unpack_linear(other))
        one.quantize([packed, other], NEVER)
        np.testing.assert_array_equal(rows_of(one, packed), rows_of(one, other))
        assert (rows_of(one, packed) != before).any()


def test_many_weights_are_quantized_in_one_call(ops, rng):
    weights = [random(rng, n, k) for n, k in ((2000, 896), (16, 64), (37, 5000), (1, 7))]
    packed = [ops.pack_linear([weight]) for weight in weights]
    ops.quantize(packed, NEVER)
    for weight, one in zip(weights, packed, strict=True):
        np.testing.assert_allclose(rows_of(ops, one), rounded(weight), rtol=1e-6)


def test_a_call_that_was_stopped_makes_nothing(ops, rng):
    packed = ops.pack_linear([random(rng, 40, 96)])
    ops.quantize([packed], np.ones(1, np.int32))
    assert not rows_of(ops, packed).any()  # memory of its own, which nothing was written to


def test_int8_values_are_counted_as_memory(ops, rng):
    packed = ops.pack_linear([random(rng, 160, 128)])
    assert packed.nbytes == 160 * 128 * 2
    for _ in range(2):
        ops.quantize([packed], NEVER)
        assert packed.nbytes == 160 * 128 * 3 + 160 * 2 * 4


@cache
def products(isa: str, rows: int) -> list[np.ndarray]:
    """Return products with adapters, biases, gates, widths that end within tiles, and values of all magnitudes."""
    ops, rng, found = CpuOps("bfloat16"), np.random.default_rng(5), []
    ops.set_isa(isa)
    for k, n in ((896, 64), (70, 37), (33, 16), (2100, 112)):
        x = rng.standard_normal((rows, k)).astype(np.float32) * np.exp2(rng.integers(-30, 30, (rows, k))).astype(
            np.float32
        )
        plain = ops.pack_linear([random(rng, n, k)], [random(rng, n)])
        gate_up, down = (
            ops.pack_linear([random(rng, n, k), random(rng, n, k)]),
            ops.pack_linear([random(rng, 40, n)]),
        )
        ops.quantize([plain, gate_up, down], NEVER)
        lora = Adapter(rng, Layer(rng, k, 1, 1, 2, n, False), {"gate_up": [5, 33]}).on(ops).layers[0][1][0]
        head = PackedAdapter((), lora, lora.nbytes)
        own = AdapterRows([head], np.arange(rows, dtype=np.int32) % 2 - 1)
        x = paddle.to_tensor(x)
        found.append(ops.linear(x, plain).numpy())
        found.append(ops.mlp(x / 2**30, gate_up, down).numpy())
        found.append(ops.logits(x, paddle.ones([k]), 1e-6, gate_up, own).numpy().copy())
    return found


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 16, 17, 40, 300])
def test_products_have_the_same_bits_at_every_instruction_set(isa, rows):
    for narrow, wide in zip(products("avx2", rows), products(isa, rows), strict=True):
        assert np.isfinite(narrow).all()
        np.testing.assert_array_equal(narrow, wide)


def test_a_row_has_the_same_bits_among_any_number_of_rows(ops, rng):
    """Widths of one and of several groups of the next linear, and of less than one."""
    for k, n in ((1000, 48), (64, 208)):
        gate_up, down = ops.pack_linear([random(rng, n, k), random(rng, n, k)]), ops.pack_linear([random(rng, 40, n)])
        ops.quantize([gate_up, down], NEVER)
        x = rng.standard_normal((70, k)).astype(np.float32) / 8
        alone = np.concatenate([ops.mlp(paddle.to_tensor(x[i : i + 1]), gate_up, down).numpy() for i in range(70)])
        for rows in (2, 8, 16, 17, 33, 70):
            np.testing.assert_array_equal(ops.mlp(paddle.to_tensor(x[:rows]), gate_up, down).numpy(), alone[:rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_on_int8_weights_agrees_with_one_on_bfloat16(ops, rng, shape):
    """The adapter itself is not quantised: it adds the same, up to the rounding of its input."""
    layer = Layer(rng, *SHAPES[shape])
    x = paddle.to_tensor(rng.standard_normal((20, layer.hidden)).astype(np.float32))
    lora = Adapter(rng, layer, {"qkv": [8, None, 3]}).on(ops).layers[0][0][0]
    own = AdapterRows([PackedAdapter((), lora, lora.nbytes)], np.zeros(20, np.int32))
    added = []
    for quantized in (False, True):
        packed = ops.pack_linear(*layer.linears["qkv"])
        if quantized:
            ops.quantize([packed], NEVER)
        with_lora = ops.logits(x, paddle.ones([layer.hidden]), 1e-6, packed, own).numpy().copy()
        added.append(with_lora - ops.logits(x, paddle.ones([layer.hidden]), 1e-6, packed).numpy())
    np.testing.assert_allclose(added[1], added[0], atol=0.02 * np.abs(added[0]).max())


def test_float32_weights_have_no_int8_values():
    for one in (CpuOps("float32"), ReferenceOps("float32")):
        with pytest.raises(AssertionError):
            one.quantize([one.pack_linear([np.ones((16, 64), np.float32)])], NEVER)
