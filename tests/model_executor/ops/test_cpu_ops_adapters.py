"""Adapters in the layers and the head equal the reference. The bits of a row depend on that row and its adapter only,
and a row without an adapter has the bits of a run without adapters."""

from __future__ import annotations

import gc
import resource
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.interface import AdapterRows, LoraPart, PackedAdapter
from fastdeploy.model_executor.ops.reference import round_to_bfloat16
from tests.support.decoder_layers import SHAPES, Adapter, Layer, make_batch

# Ranks of the projections of each linear. An adapter may miss projections and whole linears.
RANKS = {
    "rank 1": {"qkv": [1, 1, 1], "o": [1], "gate_up": [1, 1], "down": [1]},
    "rank 8": {"qkv": [8, 8, 8], "o": [8], "gate_up": [8, 8], "down": [8]},
    "rank 64": {"qkv": [64, 64, 64], "o": [64], "gate_up": [64, 64], "down": [64]},
    "mixed": {"qkv": [3, None, 16], "o": [17], "gate_up": [None, 5]},
    "few": {"qkv": [None, 2, None], "down": [33]},
}


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return the type of the weights: int8 beside bfloat16, too."""
    return request.param


@pytest.fixture(params=SHAPES)
def layer(request, rng) -> Layer:
    return Layer(rng, *SHAPES[request.param])


def adapters_of(rng, layer: Layer, *names: str) -> list[Adapter]:
    return [Adapter(rng, layer, RANKS[name]) for name in names or RANKS]


def adapter_rows(adapters: list[PackedAdapter], rows) -> AdapterRows:
    return AdapterRows(adapters, np.ascontiguousarray(rows, np.int32))


def run(ops, layer: Layer, x: np.ndarray, lengths: list[int], adapters: AdapterRows | None, **options) -> np.ndarray:
    """Compute new sequences of these lengths from position 0 on."""
    batch = make_batch(list(range(len(lengths))), [0] * len(lengths), lengths)
    cache = layer.cache(ops, len(lengths))
    return ops.decoder_layers(
        paddle.to_tensor(x), [layer.on(ops)], cache, batch, adapters=adapters, **options
    ).numpy()  # fmt: skip


def random_rows(rng, layer: Layer, count: int) -> np.ndarray:
    return rng.standard_normal((count, layer.hidden)).astype(np.float32)


@pytest.mark.covers("isa dtype layer", "isa dtype lengths", "layer lengths")
@pytest.mark.parametrize("lengths", [[1] * 33, [5, 1, 40, 1, 1, 30]], ids=["decode", "prefill and decode"])
def test_layers_with_adapters_agree_with_the_reference(ops, reference, dtype, rng, layer, lengths):
    adapters, x = adapters_of(rng, layer), random_rows(rng, layer, sum(lengths))
    rows = np.repeat(np.sort(np.arange(len(lengths)) % (len(adapters) + 1)) - 1, lengths)
    found, expected = (
        run(one, layer, x, lengths, adapter_rows([adapter.on(one) for adapter in adapters], rows))
        for one in (ops, reference)
    )
    if dtype == "float32":
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    else:  # the inputs of linears, queries and probabilities are rounded to 8 bits
        difference = np.abs(found - expected) / np.abs(expected).max()
        assert difference.max() < 0.05 and difference.mean() < 0.005


@pytest.mark.covers("isa dtype rows", "isa dtype rank", "isa dtype source", "rows rank source")
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 8, 16, 64])
@pytest.mark.parametrize("rows,k,n", [(1, 896, 64), (40, 70, 37), (65, 33, 50)])
def test_the_head_with_an_adapter_agrees_with_the_reference(ops, reference, rng, source, rank, rows, k, n):
    """The rows are bfloat16 numbers, so that both ops compute the same products."""
    x, head = rng.choice([-1.0, 1.0], (rows, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    a, b = rng.standard_normal((rank, k)).astype(np.float32), rng.standard_normal((n, rank)).astype(np.float32)
    if source == "bfloat16":
        a, b = ((round_to_bfloat16(value).view(np.uint32) >> 16).astype(np.uint16) for value in (a, b))
    own = np.arange(rows) % 3 - 1
    found, expected, base = [], [], []
    for one, into in ((ops, found), (reference, expected)):
        lora = one.pack_lora([LoraPart(a, b, 0.75)], [n], k)
        assert (lora.rank, lora.in_features, lora.out_features) == (rank, k, n)
        adapters = adapter_rows([PackedAdapter((), None, 0), PackedAdapter((), lora, lora.nbytes)], own)
        packed, norm, values = one.pack_linear([head]), paddle.ones([k]), paddle.to_tensor(x)
        base.append(one.logits(values, norm, 0.0, packed).numpy().copy())
        into.append(one.logits(values, norm, 0.0, packed, adapters).numpy())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=2e-6 * np.abs(expected[0]).max())
    np.testing.assert_array_equal(found[0][own < 1], base[0][own < 1])


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_rows_without_an_adapter_have_the_bits_of_a_run_without_adapters(ops, rng, layer):
    x, rows = random_rows(rng, layer, 60), np.repeat([-1, 0, -1, 3, 1, -1], 10)
    adapters = adapter_rows([adapter.on(ops) for adapter in adapters_of(rng, layer)], rows)
    mixed, base = run(ops, layer, x, [1] * 60, adapters), run(ops, layer, x, [1] * 60, None)
    np.testing.assert_array_equal(mixed[rows < 0], base[rows < 0])
    assert (mixed[rows >= 0] != base[rows >= 0]).any(axis=1).all()


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_row_has_the_same_bits_alone_among_other_adapters_and_with_any_number_of_threads(ops, threads, rng, layer):
    x, rows = random_rows(rng, layer, 100), np.sort(rng.integers(-1, 5, 100))
    packed = [adapter.on(ops) for adapter in adapters_of(rng, layer)]
    ops.gather_adapter(packed[2])  # where an adapter is in memory changes no bit
    together = run(ops, layer, x, [1] * 100, adapter_rows(packed, rows))
    for first, last, count in ((0, 1, 1), (40, 41, 2), (99, 100, 5), (15, 19, 1), (30, 90, 2), (0, 100, 5)):
        ops.set_num_threads(count)
        others = adapter_rows(packed[::-1], np.where(rows < 0, -1, 4 - rows)[first:last])
        np.testing.assert_array_equal(
            run(ops, layer, x[first:last], [1] * (last - first), others), together[first:last]
        )


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_sequence_has_the_same_bits_in_any_chunks(ops, rng, layer):
    [adapter], x = adapters_of(rng, layer, "mixed"), random_rows(rng, layer, 50)
    packed, weights = adapter.on(ops), layer.on(ops)
    whole = run(ops, layer, x, [50], adapter_rows([packed], np.zeros(50)))
    cache, parts = layer.cache(ops, 1), []
    for start, last in ((0, 17), (17, 18), (18, 49), (49, 50)):
        rows, batch = adapter_rows([packed], np.zeros(last - start)), make_batch([0], [start], [last - start])
        parts.append(
            ops.decoder_layers(paddle.to_tensor(x[start:last]), [weights], cache, batch, adapters=rows).numpy()
        )
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_picked_rows_keep_their_adapters(ops, rng, layer):
    lengths, picked = [30, 1, 20], np.array([29, 30, 31, 50], np.int64)
    x, own = random_rows(rng, layer, 51), np.repeat([1, -1, 0], lengths)
    adapters = adapter_rows([adapter.on(ops) for adapter in adapters_of(rng, layer)], own)
    whole = run(ops, layer, x, lengths, adapters)
    np.testing.assert_array_equal(run(ops, layer, x, lengths, adapters, rows=picked), whole[picked])
    assert run(ops, layer, x, lengths, adapters, rows=picked[:0]).shape == (0, layer.hidden)


@pytest.mark.covers("isa dtype linear", "isa layer", "layer linear", "linear where value")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("linear", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("where", ["a", "b"])
def test_an_adapter_that_is_not_finite_harms_its_own_rows_only(ops, rng, layer, value, linear, where):
    x, rows = random_rows(rng, layer, 40), np.repeat([0, -1, 1, 2], 10)
    adapters = adapters_of(rng, layer, "rank 8", "rank 8", "rank 64")
    clean = run(ops, layer, x, [1] * 40, adapter_rows([adapter.on(ops) for adapter in adapters], rows))
    getattr(adapters[1].parts[linear][-1], where)[-1, -1] = value
    dirty = run(ops, layer, x, [1] * 40, adapter_rows([adapter.on(ops) for adapter in adapters], rows))
    assert not np.isfinite(dirty[rows == 1]).all(axis=1).any()
    np.testing.assert_array_equal(dirty[rows != 1], clean[rows != 1])


def test_an_adapter_follows_the_layers_and_not_the_order_of_first_use(ops, rng):
    """Two layers with different adapters; the same adapter is used again after the layers were exchanged."""
    layer = Layer(rng, *SHAPES["small"])
    first, second = (Adapter(rng, layer, RANKS[name]).on(ops) for name in ("rank 8", "few"))
    both = PackedAdapter((first.layers[0], second.layers[0]), None, 0)
    x, batch, found = random_rows(rng, layer, 6), make_batch([0], [0], [6]), []
    for weights in ([layer.on(ops), layer.on(ops)], [layer.on(ops), layer.on(ops)]):
        for order in ([both, first], [first, both]):
            rows = adapter_rows([replace(a, layers=a.layers * (2 // len(a.layers))) for a in order], np.zeros(6))
            cache = ops.new_kv_cache(1, 16, 16, layer.kv_heads, layer.dim)
            found.append(ops.decoder_layers(paddle.to_tensor(x), weights, cache, batch, adapters=rows).numpy())
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    assert (found[0] != found[1]).any()


def test_packed_adapters_take_little_more_than_the_bytes_of_their_file(ops, rng):
    size = 2 if ops.dtype == "bfloat16" else 4
    parts = [LoraPart(np.ones((16, 896), np.float32), np.ones((n, 16), np.float32), 1.0) for n in (896, 128, 128)]
    lora = ops.pack_lora(parts, [896, 128, 128], 896)
    assert size * 16 * (3 * 896 + 1152) <= lora.nbytes < 1.05 * size * 16 * (3 * 896 + 1152)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.covers("isa", "dtype")
def test_a_dropped_adapter_is_freed_while_its_layers_serve_on(ops, rng):
    layer = Layer(rng, *SHAPES["small"])
    weights, cache, batch = layer.on(ops), layer.cache(ops, 1), make_batch([0], [0], [5])
    kept, x = Adapter(rng, layer, RANKS["rank 8"]).on(ops), paddle.to_tensor(random_rows(rng, layer, 5))
    big = [LoraPart(np.ones((1024, 64), np.float32), np.ones((n, 1024), np.float32), 1.0) for n in (64, 32, 32)]

    def use(adapter: PackedAdapter) -> None:
        ops.decoder_layers(x.clone(), [weights], cache, batch, adapters=adapter_rows([kept, adapter], np.ones(5)))

    use(kept)
    before = resident_bytes()
    for gathered in (False, True):
        loras = [ops.pack_lora(big, [64, 32, 32], 64) for _ in range(60)]
        adapter = PackedAdapter((((loras[0], None), (None, None)),), None, 0)
        whole = PackedAdapter(tuple(((lora, None),) for lora in loras), None, 0)
        if gathered:
            ops.gather_adapter(whole)
        use(adapter)
        assert resident_bytes() > before + (15 << 20)
        gone = [weakref.ref(adapter), *map(weakref.ref, loras)]
        del loras, adapter, whole
        gc.collect()
        assert not any(reference() for reference in gone)
        assert resident_bytes() < before + (5 << 20)
    use(kept)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.array([0, 0, 0, 0, 2], np.int32)},
        {"rows": np.array([0, 0, 0, 0, -2], np.int32)},
        {"rows": np.zeros(4, np.int32)},
        {"rows": np.zeros(5, np.int64)},
        {"rows": np.zeros(10, np.int32)[::2]},
    ],
    ids=["behind the last", "below -1", "a row short", "int64", "strided"],
)
def test_rows_that_would_reach_outside_the_adapters_are_refused(ops, rng, wrong):
    layer = Layer(rng, *SHAPES["small"])
    packed = [adapter.on(ops) for adapter in adapters_of(rng, layer, "rank 8", "mixed")]
    with pytest.raises(AssertionError):
        run(ops, layer, random_rows(rng, layer, 5), [5], AdapterRows(packed, np.zeros(5, np.int32))._replace(**wrong))


def test_an_adapter_of_other_layers_is_refused(ops, reference, rng):
    layer, other = Layer(rng, *SHAPES["small"]), Layer(rng, *SHAPES["odd"])
    for adapter in (Adapter(rng, other, RANKS["rank 8"]).on(ops), Adapter(rng, layer, RANKS["rank 8"]).on(ops, 2)):
        with pytest.raises((AssertionError, ValueError)):
            run(ops, layer, random_rows(rng, layer, 5), [5], adapter_rows([adapter], np.zeros(5)))
    part = LoraPart(np.ones((4, 64), np.float32), np.ones((32, 4), np.float32), 1.0)
    for one in (ops, reference):
        for parts, rows, columns in (([part], [32], 65), ([part], [33], 64), ([part], [32, 8], 64), ([None], [32], 64)):
            with pytest.raises((AssertionError, ValueError)):
                one.pack_lora(parts, rows, columns)
