"""Deltas by the C++ ops equal the reference: the values, the change of the fingerprint and the problems."""

from __future__ import annotations

import threading

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import ZERO, fingerprint
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.interface import DeltaItem, Ops, Problem, Region, StageResult
from fastdeploy.model_executor.ops.reference import ReferenceOps, round_to_bfloat16

pytestmark = pytest.mark.by_width

GO_ON = np.zeros(1, np.int32)


def bits_of(ops: Ops) -> type[np.unsignedinteger]:
    return np.uint16 if ops.dtype == "bfloat16" else np.uint32


def finite(ops: Ops, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random bits of finite values in the dtype of the ops."""
    values = round_to_bfloat16(rng.standard_normal(shape).astype(np.float32)).view(np.uint32)
    return (values >> 16).astype(np.uint16) if ops.dtype == "bfloat16" else values


def floats(values: np.ndarray) -> np.ndarray:
    """Return the bits of values as what ``pack_linear`` takes."""
    return values if values.dtype == np.uint16 else values.view(np.float32)


def payload_of(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the payload of a change from old to new, flat bits, at an odd address."""
    index = np.flatnonzero(old != new)
    payload = delta_format.overwrite(index, new[index])
    return np.concatenate([np.zeros(1, np.uint8), payload])[1:]


def bits(ops: Ops, weight: PackedLinear) -> np.ndarray:
    return ops.unpack_linear(weight).view(bits_of(ops))


@given(data=st.data())
def test_a_delta_of_rows_equals_the_reference(ops: CpuOps, reference: ReferenceOps, data):
    columns = data.draw(st.one_of(st.integers(1, 100), st.just(2000)), "columns")
    rows = data.draw(st.integers(1, 200), "rows")
    first = data.draw(st.integers(0, rows), "first")
    last = data.draw(st.integers(first, rows), "last")
    share = data.draw(st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]), "share")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    base = finite(ops, rng, rows, columns)
    old = base[first:last].reshape(-1)
    new = np.where(rng.random(old.size) < share, finite(ops, rng, old.size), old)
    results = []
    for either in (ops, reference):
        weight = either.pack_linear([floats(base)])
        region = Region(last - first, columns, weight, first)
        results.append(either.apply_deltas([DeltaItem(region, payload_of(old, new))], GO_ON))
        expected = np.concatenate([base[:first], new.reshape(-1, columns), base[last:]])
        np.testing.assert_array_equal(bits(either, weight), expected)
    assert results[0] == results[1] and results[0][0].problem is None
    after = fingerprint(floats(old)) + results[0][0].fingerprint
    assert after == fingerprint(floats(new))


@given(size=st.one_of(st.integers(0, 3000), st.just(300_001)))
def test_a_delta_of_a_vector_equals_the_reference(ops: CpuOps, reference: ReferenceOps, size: int):
    rng = np.random.default_rng(size)
    old = finite(ops, rng, size)
    new = np.where(rng.random(size) < 0.1, finite(ops, rng, size), old)
    shift = 16 if ops.dtype == "bfloat16" else 0
    results = []
    for either in (ops, reference):
        vector = (old.astype(np.uint32) << shift).view(np.float32)
        item = DeltaItem(Region(1, size, vector=vector), payload_of(old, new))
        results.append(either.apply_deltas([item], GO_ON))
        np.testing.assert_array_equal(vector.view(np.uint32) >> shift, new)
    assert results[0] == results[1] and results[0][0].problem is None


def test_a_large_tensor_is_cut_into_slices_that_add_up(ops: CpuOps, rng):
    """Slices of an overwrite have 64 KiB of gaps."""
    base = finite(ops, rng, 1000, 1001)
    new = np.where(rng.random(base.size) < 0.3, finite(ops, rng, base.size), base.reshape(-1))
    weight = ops.pack_linear([floats(base)])
    item = DeltaItem(Region(1000, 1001, weight), payload_of(base.reshape(-1), new))
    (result,) = ops.apply_deltas([item], GO_ON)
    np.testing.assert_array_equal(bits(ops, weight).reshape(-1), new)
    assert fingerprint(floats(base)) + result.fingerprint == fingerprint(floats(new))


@pytest.mark.parametrize(("before", "gap"), [(65_535, 255), (65_534, 510), (65_530, 3000), (65_536, 1), (65_535, 254)])
def test_a_gap_may_go_on_in_the_next_slice(ops: CpuOps, rng, before: int, gap: int):
    """The first 64 KiB of gaps end near value ``before``, behind which lies a longer gap."""
    base = finite(ops, rng, 100, 1001)
    new = base.reshape(-1).copy()
    index = np.append(np.arange(before), [before - 1 + gap, before + gap])
    new[index] ^= 1
    weight = ops.pack_linear([floats(base)])
    payload = delta_format.overwrite(index, new[index])
    (result,) = ops.apply_deltas([DeltaItem(Region(100, 1001, weight), payload)], GO_ON)
    np.testing.assert_array_equal(bits(ops, weight).reshape(-1), new)
    assert fingerprint(floats(base)) + result.fingerprint == fingerprint(floats(new))


def test_a_zero_gap_at_the_start_of_a_slice_is_refused(ops: CpuOps, rng):
    base = finite(ops, rng, 100, 1001)
    payload = delta_format.overwrite(np.arange(70_000), finite(ops, rng, 70_000))
    payload[payload.size - 70_000 + 65_536] = 0
    weight = ops.pack_linear([floats(base)])
    item = DeltaItem(Region(100, 1001, weight), payload)
    assert ops.apply_deltas([item], GO_ON) == [StageResult(ZERO, Problem.MALFORMED)]
    np.testing.assert_array_equal(bits(ops, weight), base)


@given(data=st.data())
def test_a_malformed_overwrite_is_refused_and_changes_nothing(ops: CpuOps, reference: ReferenceOps, data):
    rows, columns = data.draw(st.integers(1, 40), "rows"), data.draw(st.integers(1, 40), "columns")
    size = rows * columns
    rng = np.random.default_rng(size)
    index = np.flatnonzero(rng.random(size) < 0.5)
    payload = delta_format.overwrite(index, finite(ops, rng, index.size))
    kind = data.draw(st.sampled_from(["cut", "grown", "count", "zero gap", "beyond", "unfinished"]), "kind")
    gaps = payload[payload.size - index.size :]  # all are below 255
    if kind == "cut":
        payload = payload[: data.draw(st.integers(0, payload.size - 1))]
    elif kind == "grown":
        more = st.lists(st.integers(0, 255), min_size=1, max_size=9)
        payload = np.append(payload, np.array(data.draw(more), np.uint8))
    elif kind == "count":
        payload[:4].view("<u4")[:] = data.draw(st.sampled_from([index.size + 1, index.size + 2**31, 2**32 - 1]))
    elif index.size < 2:
        return
    elif kind == "zero gap":
        gaps[data.draw(st.integers(1, index.size - 1))] = 0
    elif kind == "beyond":
        more = size - int(index[-1])
        payload = np.insert(payload, payload.size - index.size, [255] * (more // 255) + [more % 255])
        payload[:4].view("<u4")[:] += 1
        payload = np.insert(payload, 4, [0] * (2 if ops.dtype == "bfloat16" else 4))
    else:
        gaps[data.draw(st.integers(0, index.size - 1))] = 255
    base = finite(ops, rng, rows, columns)
    vector = np.zeros(size, np.float32)
    for either in (ops, reference):
        weight = either.pack_linear([floats(base)])
        items = [
            DeltaItem(Region(rows, columns, weight), payload),
            DeltaItem(Region(1, size, vector=vector), payload),
        ]
        assert either.apply_deltas(items, GO_ON) == [StageResult(ZERO, Problem.MALFORMED)] * 2
        np.testing.assert_array_equal(bits(either, weight), base)
        assert not vector.any()


def test_a_new_value_that_is_not_finite_is_refused_and_other_items_go_on(ops, reference, rng):
    infinity = 0x7F80 if ops.dtype == "bfloat16" else 0x7F800000
    base = finite(ops, rng, 300, 900).reshape(-1)
    good = np.where(rng.random(base.size) < 0.3, finite(ops, rng, base.size), base)
    for at in (0, 1000, base.size - 1):
        bad = good.copy()
        bad[at] = infinity
        for either in (ops, reference):
            weights = [either.pack_linear([floats(base.reshape(300, 900))]) for _ in range(2)]
            items = [
                DeltaItem(Region(300, 900, weight), payload_of(base, new))
                for weight, new in zip(weights, (bad, good), strict=True)
            ]
            refused, applied = either.apply_deltas(items, GO_ON)
            assert refused == StageResult(ZERO, Problem.NOT_FINITE) and applied.problem is None
            np.testing.assert_array_equal(bits(either, weights[1]).reshape(-1), good)


def test_stop_ends_deltas_and_is_told(ops: CpuOps, rng):
    base = finite(ops, rng, 50, 50)
    weight = ops.pack_linear([floats(base)])
    new = finite(ops, rng, base.size)
    item = DeltaItem(Region(50, 50, weight), payload_of(base.reshape(-1), new))
    assert ops.apply_deltas([item], np.ones(1, np.int32)) == [StageResult(ZERO, Problem.STOPPED)]
    np.testing.assert_array_equal(bits(ops, weight), base)


@pytest.mark.parametrize("turns", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_deltas_beside_steps_and_of_tensors_that_share_a_tile_have_the_bits_that_they_have_alone(
    ops: CpuOps, rng, turns: int
):
    count, rows, columns = 8, 7, 3000
    base = finite(ops, rng, count * rows, columns)
    new = np.where(rng.random(base.shape) < 0.5, finite(ops, rng, *base.shape), base)
    weight = ops.pack_linear([rng.standard_normal((300, 512)).astype(np.float32)])
    x = paddle.to_tensor(rng.standard_normal((8, 512)).astype(np.float32))
    product = ops.linear(x, weight).numpy()
    ops.set_num_threads(4)
    changed = ops.pack_linear([floats(base)])
    differences = []

    def apply() -> None:
        """Change the weight there and back."""
        for turn in range(turns):
            old, then = (base, new) if turn % 2 == 0 else (new, base)
            items = [
                DeltaItem(
                    Region(rows, columns, changed, i * rows),
                    payload_of(old[i * rows : (i + 1) * rows].reshape(-1), then[i * rows : (i + 1) * rows].reshape(-1)),
                )
                for i in range(count)
            ]
            results = ops.apply_deltas(items, GO_ON)
            differences.append((bits(ops, changed) != then).sum() + sum(r.problem is not None for r in results))

    try:
        stager = threading.Thread(target=apply)
        stager.start()
        while stager.is_alive():
            np.testing.assert_array_equal(ops.linear(x, weight).numpy(), product)
        stager.join()
    finally:
        ops.set_num_threads(0)
    assert differences == [0] * turns
