"""Tensors that have all experts, each matrix transposed: staged and changed like the rows that they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.core.fingerprint import fingerprint
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.interface import DeltaItem, Problem, Region, StageItem
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.model_executor.ops.reference_weights import DTYPES
from model_executor.ops.test_cpu_ops_deltas import bits, finite, floats, payload_of
from model_executor.ops.test_cpu_ops_stage import GO_ON, SOURCES, finite_bits

pytestmark = pytest.mark.by_width

SHAPES = st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([16, 48, 80, 528, 1600]), st.booleans())
COLUMNS = st.sampled_from([1, 2, 31, 48, 80, 257])


def rows_of(tensor: np.ndarray, interleaved: bool) -> np.ndarray:
    """Return the rows of the linear of a tensor [experts, columns, rows of an expert]."""
    rows = tensor.swapaxes(1, 2)
    if interleaved:
        rows = np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)
    return np.ascontiguousarray(rows).reshape(-1, tensor.shape[1])


@settings(max_examples=25)
@given(data=st.data())
def test_a_tensor_of_experts_is_staged_like_its_rows(ops: CpuOps, reference: ReferenceOps, data):
    (experts, half, interleaved), columns = data.draw(SHAPES), data.draw(COLUMNS)
    source, of_expert = data.draw(SOURCES), half * (1 + interleaved)
    raw = finite_bits(np.random.default_rng(half), source, experts * columns * of_expert)
    tensor = raw.view(DTYPES[source]).reshape(experts, columns, of_expert)
    plain = rows_of(tensor, interleaved).reshape(-1).view(np.uint8)
    weights = [either.new_linear(experts * of_expert, columns, False) for either in (ops, reference, reference)]
    region = Region(experts * of_expert, columns, experts=experts, interleaved=int(interleaved))
    regions = [region._replace(linear=weight) for weight in weights]
    found, wanted = (
        either.stage([StageItem(region, source, 0, memory=raw)], GO_ON)
        for either, region in zip((ops, reference), regions, strict=False)
    )
    assert found == wanted and found[0].problem is None
    reference.stage([StageItem(regions[2]._replace(experts=0), source, 0, memory=plain)], GO_ON)
    for either, weight in ((ops, weights[0]), (reference, weights[1])):
        np.testing.assert_array_equal(either.unpack_linear(weight), reference.unpack_linear(weights[2]))


@settings(max_examples=25)
@given(data=st.data())
def test_a_delta_of_a_tensor_of_experts_changes_its_rows(ops: CpuOps, reference: ReferenceOps, data):
    (experts, half, interleaved), columns = data.draw(SHAPES), data.draw(COLUMNS)
    of_expert, share = half * (1 + interleaved), data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]))
    rng = np.random.default_rng(half)
    old = finite(ops, rng, experts, columns, of_expert)
    new = np.where(rng.random(old.shape) < share, finite(ops, rng, *old.shape), old)
    results = []
    for either in (ops, reference):
        weight = either.pack_linear([floats(rows_of(old, interleaved))])
        region = Region(experts * of_expert, columns, weight, experts=experts, interleaved=int(interleaved))
        delta = payload_of(old.reshape(-1), new.reshape(-1))
        results.append(either.apply_deltas([DeltaItem(region, delta)], GO_ON)[0])
        np.testing.assert_array_equal(bits(either, weight), rows_of(new, interleaved))
    assert results[0] == results[1] and results[0].problem is None
    assert fingerprint(floats(old)) + results[0].fingerprint == fingerprint(floats(new))


@pytest.mark.parametrize(
    ("source", "value", "problem"),
    [("F32", 3.4e38, Problem.TOO_LARGE), ("F32", np.inf, Problem.NOT_FINITE), ("BF16", 0x7FC0, Problem.NOT_FINITE)],
)
def test_a_bad_value_of_a_tensor_of_experts_is_found(source, value, problem):
    ops, tensor = CpuOps("bfloat16"), np.ones((3, 80, 96), DTYPES[source])
    tensor[2, 79, 95] = value
    region = Region(3 * 96, 80, ops.new_linear(3 * 96, 80, False), experts=3, interleaved=1)
    item = StageItem(region, source, 0, memory=tensor.reshape(-1).view(np.uint8))
    assert ops.stage([item], GO_ON)[0].problem == problem
    cut = item._replace(memory=item.memory[:-1])
    assert ops.stage([cut], GO_ON)[0].problem == Problem.CUT_SHORT
