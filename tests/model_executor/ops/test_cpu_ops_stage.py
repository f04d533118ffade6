"""Staging by the C++ ops equals the reference: the packed bits, the fingerprints and the problems."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.core.fingerprint import ZERO, fingerprint
from fastdeploy.model_executor.ops.cpu import CpuLinear, CpuOps
from fastdeploy.model_executor.ops.interface import Problem, Region, StageItem, StageResult, View
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.model_executor.ops.reference_weights import DTYPES

pytestmark = pytest.mark.by_width

GO_ON = np.zeros(1, np.int32)
SOURCES = st.sampled_from(sorted(DTYPES))
# Rows and columns at the edges of tiles (16 and 32), odd, and more than one piece of 256 KiB.
COLUMNS = st.one_of(st.integers(1, 100), st.sampled_from([896, 1024, 4097]))


def finite_bits(rng: np.random.Generator, source: str, size: int) -> np.ndarray:
    """Return random finite values of a source dtype, denormals and both zeros among them, as bytes. Float32 values are
    small enough for bfloat16."""
    kind = DTYPES[source]
    bits = rng.integers(0, 2 ** (8 * kind.itemsize), size, dtype=np.uint64).astype(f"<u{kind.itemsize}")
    exponent = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[source]
    lowest = exponent & -exponent
    bits[bits & exponent == exponent] ^= lowest
    if source == "F32":
        bits[bits & 0x7F000000 == 0x7F000000] ^= 0x01000000
    bits[rng.random(size) < 0.05] = 0
    return bits.view(np.uint8)


@given(data=st.data())
def test_staging_a_linear_in_parts_equals_the_reference(ops: CpuOps, reference: ReferenceOps, tmp_path: Path, data):
    """Several tensors of one linear begin at any row, in memory and in files at any byte."""
    columns = data.draw(COLUMNS, "columns")
    limit = 40 if columns > 100 else 300
    parts = data.draw(
        st.lists(st.tuples(st.integers(0, limit), SOURCES, st.booleans()), min_size=1, max_size=4), "parts"
    )
    gap, spare = data.draw(st.integers(0, 40), "rows before"), data.draw(st.integers(0, 20), "rows behind")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    rows = gap + sum(n for n, _, _ in parts) + spare
    if rows == 0:
        return
    weights, sources, first_row = [either.new_linear(rows, columns, False) for either in (ops, reference)], [], gap
    path = tmp_path / "source"
    with path.open("wb+") as file:
        for n, source, in_memory in parts:
            raw = finite_bits(rng, source, n * columns)
            offset = int(rng.integers(0, 5))
            memory = np.concatenate([np.full(offset, 0xFF, np.uint8), raw])
            if not in_memory:
                offset += file.tell()
                file.write(memory.tobytes())
            sources.append((n, source, first_row, offset, memory if in_memory else None))
            first_row += n
        file.flush()
        results = []
        for either, weight in zip((ops, reference), weights, strict=True):
            items = [
                StageItem(Region(n, columns, weight, row), source, offset, file.fileno(), memory)
                for n, source, row, offset, memory in sources
            ]
            results.append(either.stage(items, GO_ON))
    assert results[0] == results[1]
    assert all(result.problem is None for result in results[0])
    np.testing.assert_array_equal(ops.unpack_linear(weights[0]), reference.unpack_linear(weights[1]))


@settings(max_examples=25)
@given(data=st.data())
def test_a_part_of_a_transposed_tensor_is_staged_like_the_same_rows(ops: CpuOps, reference: ReferenceOps, data):
    """The rows come in runs of a stored tensor [columns, stride]. Large ones have several blocks."""
    run, runs = data.draw(st.sampled_from([1, 3, 16, 24, 64, 1100]), "run"), data.draw(st.integers(1, 3), "runs")
    rows, columns = run * runs, data.draw(st.sampled_from([1, 2, 31, 32, 100, 257, 600]), "columns")
    before, between, source = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 20)), data.draw(SOURCES, "source")
    step = run + between
    stride = before + runs * step + data.draw(st.integers(0, 3))
    in_memory, gap = data.draw(st.booleans(), "in memory"), data.draw(st.integers(0, 20), "rows before")
    kind = DTYPES[source]
    stored = finite_bits(np.random.default_rng(rows), source, stride * columns).view(kind).reshape(columns, stride)
    picked = [before + r * step + i for r in range(runs) for i in range(run)]
    plain = np.ascontiguousarray(stored[:, picked].T).reshape(-1).view(np.uint8)
    raw, offset, view = stored.reshape(-1).view(np.uint8), before * kind.itemsize, View(stride, run, step)
    weights = [either.new_linear(gap + rows + 3, columns, False) for either in (ops, reference, reference)]
    regions = [Region(rows, columns, weight, gap) for weight in weights]
    with tempfile.TemporaryFile() as file:
        file.write(raw.tobytes())
        file.flush()
        place = (-1, raw) if in_memory else (file.fileno(), None)
        found = ops.stage([StageItem(regions[0], source, offset, *place, view)], GO_ON)
        wanted = reference.stage([StageItem(regions[1], source, 0, memory=plain)], GO_ON)
        assert reference.stage([StageItem(regions[2], source, offset, *place, view)], GO_ON) == wanted == found
    assert found[0].problem is None
    ours, *theirs = (either.unpack_linear(w) for either, w in zip((ops, reference, reference), weights, strict=True))
    for one in theirs:
        np.testing.assert_array_equal(ours, one)


@pytest.mark.parametrize(
    ("source", "value", "problem"),
    [("F32", 3.4e38, Problem.TOO_LARGE), ("F32", np.inf, Problem.NOT_FINITE), ("F16", np.nan, Problem.NOT_FINITE)],
)
def test_a_bad_value_of_a_transposed_tensor_is_found(source, value, problem):
    ops, stored = CpuOps("bfloat16"), np.ones((300, 1200), DTYPES[source])
    stored[299, 1199] = value
    item = StageItem(
        Region(1200, 300, ops.new_linear(1200, 300, False)), source, 0,
        memory=stored.reshape(-1).view(np.uint8), view=View(1200, 1200, 0),
    )  # fmt: skip
    assert ops.stage([item], GO_ON)[0].problem == problem
    cut = item._replace(memory=item.memory[:-1])
    assert ops.stage([cut], GO_ON)[0].problem == Problem.CUT_SHORT


@given(size=st.one_of(st.integers(0, 5000), st.just(300_001)), source=SOURCES)
def test_staging_a_vector_equals_the_reference(ops: CpuOps, reference: ReferenceOps, size: int, source: str):
    """The vector is a norm or a bias. Without a vector, the values are checked only."""
    memory = finite_bits(np.random.default_rng(size), source, size)
    ours, theirs = np.ones(size, np.float32), np.ones(size, np.float32)
    for targets in ((ours, theirs), (None, None)):
        items = [StageItem(Region(1, size, vector=vector), source, 0, memory=memory) for vector in targets]
        result = ops.stage(items[:1], GO_ON)
        assert result == reference.stage(items[1:], GO_ON)
        assert result[0].problem is None
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_values_that_stage_packed_multiply_like_those_of_pack_linear(ops: CpuOps, rng):
    """Both fill the padding of the last tiles in the same way."""
    for n, k in [(17, 33), (50, 896), (48, 64)]:
        source = rng.standard_normal((n, k)).astype(np.float32)
        weight = ops.new_linear(n, k, False)
        item = StageItem(Region(n, k, weight), "F32", 0, memory=source.reshape(-1).view(np.uint8))
        assert ops.stage([item], GO_ON)[0].problem is None
        x = paddle.to_tensor(rng.standard_normal((3, k)).astype(np.float32))
        expected = ops.linear(x, ops.pack_linear([source])).numpy()
        np.testing.assert_array_equal(ops.linear(x, weight).numpy(), expected)


def test_the_fingerprint_is_that_of_the_values_in_the_dtype_of_the_ops(ops: CpuOps, rng):
    source = rng.standard_normal((700, 1000)).astype(np.float32)
    weight = ops.new_linear(700, 1000, False)
    item = StageItem(Region(700, 1000, weight), "F32", 0, memory=source.reshape(-1).view(np.uint8))
    (result,) = ops.stage([item], GO_ON)
    assert result.fingerprint == fingerprint(ops.unpack_linear(weight)) != ZERO


NOT_FINITE = {"F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001], "BF16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81]}
NOT_FINITE["F16"] = [0x7C00, 0xFC00, 0x7E00, 0x7C01]


@pytest.mark.parametrize("source", sorted(DTYPES))
def test_a_value_that_is_not_finite_is_found_anywhere(ops: CpuOps, rng, source):
    size, kind = 200_003, f"<u{DTYPES[source].itemsize}"
    good = finite_bits(rng, source, size)
    for at in [0, 1, 2, 15, 31, 32, 1024, 2048, 131_072, size - 2, size - 1]:
        for bits in NOT_FINITE[source]:
            bad = good.copy()
            bad.view(kind)[at] = bits
            items = [StageItem(Region(1, size), source, 0, memory=memory) for memory in (bad, good)]
            assert [result.problem for result in ops.stage(items, GO_ON)] == [Problem.NOT_FINITE, None]


def test_a_float32_beyond_bfloat16_is_too_large_unless_another_value_is_not_finite(rng):
    size = 200_003
    values = np.zeros(size, np.float32)
    largest = np.array([0x7F7F7FFF], np.uint32).view(np.float32)[0]  # rounds to the largest bfloat16
    smallest = np.array([0x7F7F8000], np.uint32).view(np.float32)[0]  # rounds to infinity
    for ops in (CpuOps("bfloat16"), ReferenceOps("bfloat16")):
        for extremes, problem in [
            ([largest, -largest], None),
            ([0.0, smallest], Problem.TOO_LARGE),
            ([0.0, -smallest], Problem.TOO_LARGE),
            ([smallest, np.inf], Problem.NOT_FINITE),
            ([np.nan, smallest], Problem.NOT_FINITE),
        ]:
            values[[3, size - 5]] = extremes
            item = StageItem(Region(1, size), "F32", 0, memory=values.view(np.uint8))
            assert ops.stage([item], GO_ON)[0].problem == problem
    values[[3, size - 5]] = smallest, -smallest
    item = StageItem(Region(1, size), "F32", 0, memory=values.view(np.uint8))
    assert CpuOps("float32").stage([item], GO_ON)[0].problem is None


def test_a_source_that_is_cut_short_or_cannot_be_read_does_not_stop_the_others(ops: CpuOps, rng, tmp_path: Path):
    values = finite_bits(rng, "F32", 100_000)
    path = tmp_path / "source"
    path.write_bytes(values.tobytes())
    fd, folder = os.open(path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    try:
        weights = [ops.new_linear(100, 1000, False) for _ in range(2)]
        items = [
            StageItem(Region(100, 1000, weights[0]), "F32", 4, fd),
            StageItem(Region(100, 1000), "F32", 1, memory=values),
            StageItem(Region(10, 1000), "F32", 0, folder),
            StageItem(Region(100, 1000, weights[1]), "F32", 0, fd),
        ]
        results = ops.stage(items, GO_ON)
    finally:
        os.close(fd)
        os.close(folder)
    assert [result.problem for result in results] == [
        Problem.CUT_SHORT,
        Problem.CUT_SHORT,
        Problem.READ_ERROR,
        None,
    ]
    assert os.strerror(results[2].errno) == "Is a directory"
    assert results[3].fingerprint == fingerprint(ops.unpack_linear(weights[1]))


def test_stop_ends_a_staging_and_is_told(ops: CpuOps, rng):
    values = finite_bits(rng, "F32", 10_000)
    weight = ops.new_linear(100, 100, False)
    item = StageItem(Region(100, 100, weight), "F32", 0, memory=values)
    assert ops.stage([item, item], np.ones(1, np.int32)) == [StageResult(ZERO, Problem.STOPPED)] * 2
    assert not ops.unpack_linear(weight).any()


def test_rows_that_do_not_arrive_keep_their_bits(ops: CpuOps, rng):
    weight = ops.pack_linear([rng.standard_normal((100, 70)).astype(np.float32)])
    before = ops.unpack_linear(weight)
    values = finite_bits(rng, "F32", 20 * 70)
    ops.stage([StageItem(Region(20, 70, weight, 35), "F32", 0, memory=values)], GO_ON)
    after = ops.unpack_linear(weight)
    np.testing.assert_array_equal(after[:35], before[:35])
    np.testing.assert_array_equal(after[55:], before[55:])
    assert (after[35:55] != before[35:55]).any()


@given(n=st.integers(1, 200), k=st.integers(1, 100), data=st.data())
def test_copied_rows_and_bias_have_the_bits_of_the_source(ops: CpuOps, n: int, k: int, data):
    first = data.draw(st.integers(0, n), "first")
    last = data.draw(st.integers(first, n), "last")
    rng = np.random.default_rng(n * k)
    source, target = (
        ops.pack_linear([rng.standard_normal((n, k)).astype(np.float32)], [rng.standard_normal(n).astype(np.float32)])
        for _ in range(2)
    )
    expected, bias = ops.unpack_linear(target), ops.unpack_bias(target)
    expected[first:last], bias[first:last] = ops.unpack_linear(source, first, last), ops.unpack_bias(source)[first:last]
    ops.copy_rows(target, source, first, last)
    np.testing.assert_array_equal(ops.unpack_linear(target), expected)
    np.testing.assert_array_equal(ops.unpack_bias(target), bias)


def test_staging_runs_on_threads_of_a_lower_priority_than_the_caller_whose_own_stays(ops: CpuOps, rng):
    """The caller has a nice value of its own, as in a process that was started by nice."""
    values, seen, after = finite_bits(rng, "F32", 4_000_000), set[int](), list[int]()
    items = [StageItem(Region(1, 4_000_000), "F32", 0, memory=values)]
    own = min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 3, 19)
    expected, enough, others = min(own + 10, 19), threading.Event(), set[int]()
    policies = set[int]()

    def threads() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    def stage() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        others.update(threads())
        while not enough.is_set():
            ops.stage(items, GO_ON)
        after.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    stager, deadline = threading.Thread(target=stage), time.monotonic() + 60
    stager.start()
    while not (expected in seen and os.SCHED_IDLE in policies) and time.monotonic() < deadline:
        for thread in threads() - others if others else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                seen.add(os.getpriority(os.PRIO_PROCESS, thread))
                policies.add(os.sched_getscheduler(thread))
    enough.set()
    stager.join()
    assert seen <= {own, expected} and expected in seen  # a thread begins with that of the caller
    assert os.SCHED_IDLE in policies
    assert after == [own]


@pytest.mark.covers("isa", "dtype")
def test_a_file_that_is_only_on_the_disk_is_staged_like_memory(ops: CpuOps, rng, tmp_path: Path):
    """It is longer than what is read ahead, and its tensors come in another order than their bytes."""
    columns, half = 1024, 18_000
    raw = finite_bits(rng, "BF16", 2 * half * columns)
    path = tmp_path / "source"
    path.write_bytes(raw)
    parts = ((half, raw.nbytes // 2), (0, 0))  # first row, first byte
    weights = [ops.new_linear(2 * half, columns, False) for _ in range(2)]
    regions = [[Region(half, columns, weight, row) for row, _ in parts] for weight in weights]
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        from_file = [StageItem(r, "BF16", at, fd=file.fileno()) for r, (_, at) in zip(regions[0], parts, strict=True)]
        found = ops.stage(from_file, GO_ON)
    in_memory = [StageItem(r, "BF16", at, memory=raw) for r, (_, at) in zip(regions[1], parts, strict=True)]
    assert found == ops.stage(in_memory, GO_ON)
    np.testing.assert_array_equal(ops.unpack_linear(weights[0]), ops.unpack_linear(weights[1]))


@pytest.mark.parametrize("turns", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_beside_a_staging_and_tensors_that_share_a_tile_have_the_bits_that_they_have_alone(
    ops: CpuOps, rng, turns: int
):
    """Eight tensors of seven rows each share column tiles, and threads stage them at the same time."""
    count, rows, columns = 8, 7, 20_000
    sources = [finite_bits(rng, "BF16", rows * columns) for _ in range(count)]
    weight = ops.pack_linear([rng.standard_normal((300, 512)).astype(np.float32)])
    x = paddle.to_tensor(rng.standard_normal((8, 512)).astype(np.float32))
    product = ops.linear(x, weight).numpy()
    ops.set_num_threads(4)
    staged: list[CpuLinear] = []

    def stage() -> None:
        for _ in range(turns):
            target = ops.new_linear(count * rows, columns, False)
            items = [
                StageItem(Region(rows, columns, target, i * rows), "BF16", 0, memory=source)
                for i, source in enumerate(sources)
            ]
            assert all(result.problem is None for result in ops.stage(items, GO_ON))
            staged.append(target)

    try:
        stager = threading.Thread(target=stage)
        stager.start()
        while stager.is_alive():
            np.testing.assert_array_equal(ops.linear(x, weight).numpy(), product)
        stager.join()
    finally:
        ops.set_num_threads(0)
    values = np.concatenate([source.view(np.uint16) for source in sources]).reshape(-1, columns)
    expected = values if ops.dtype == "bfloat16" else (values.astype(np.uint32) << 16).view(np.float32)
    assert len(staged) == turns
    for target in staged:
        np.testing.assert_array_equal(ops.unpack_linear(target), expected)
