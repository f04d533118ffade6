"""A decoder layer and the logits equal the reference. The bits of a row do not depend on other rows."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.models import build_model, parse_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.model_executor.models.interface import new_kv_cache
from fastdeploy.model_executor.ops import cpu
from fastdeploy.model_executor.ops.blocks import DecoderLayer
from fastdeploy.model_executor.ops.interface import Routing
from fastdeploy.testing.checkpoints import config_json, random_tensors
from model_executor.ops.test_cpu_ops_expert_tensors import rows_of
from support.specs import SPECS
from tests.support.decoder_layers import BLOCK, SHAPES, Layer, make_batch, with_attention


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return the type of the weights: int8 beside bfloat16, too."""
    return request.param


@pytest.fixture(params=SHAPES)
def layer(request, rng) -> Layer:
    return Layer(rng, *SHAPES[request.param])


@pytest.mark.covers("isa dtype layer", "isa dtype lengths", "layer lengths")
@pytest.mark.parametrize("lengths", [[1], [5, 1, 40], [1] * 33, [130, 1]])
def test_a_layer_agrees_with_the_reference(ops, reference, dtype, rng, layer, lengths):
    batch = make_batch(list(range(len(lengths))), [0] * len(lengths), lengths)
    x = rng.standard_normal((sum(lengths), layer.hidden)).astype(np.float32)
    found = [
        one.decoder_layers(paddle.to_tensor(x), [layer.on(one)], layer.cache(one, len(lengths)), batch).numpy()
        for one in (ops, reference)
    ]
    if dtype == "float32":
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)
    else:  # norms, queries, probabilities and the input of down are rounded to 8 bits
        difference = np.abs(found[0] - found[1])
        assert difference.max() < 0.1 and difference.mean() < 0.01


@pytest.mark.covers("isa dtype", "isa name", "dtype name")
@pytest.mark.parametrize("name", SPECS)
def test_the_blocks_of_every_architecture_agree_with_the_reference(ops, reference, dtype, rng, name):
    """In bfloat16, the ops compute with the experts that the reference chose: where two experts have nearly the same
    score, rounding decides."""
    spec, tensors, found, routing = SPECS[name], random_tensors(SPECS[name]), [], None
    batch, x = make_batch([0, 1], [0, 0], [21, 1]), rng.standard_normal((22, spec.hidden)).astype(np.float32)
    for one in (reference, ops):
        model = build_model(parse_config(config_json(spec)), one, spec.max_len)
        experts = experts_of_config(model.config)
        if experts is not None:
            forced = routing is not None and dtype != "float32"
            chosen = routing.experts if forced else np.zeros((len(x), len(experts.layers), experts.top_k), np.uint16)
            routing = Routing(chosen, forced)
        values = {}
        for parameter in model.parameters:
            weights, biases = ([tensors[name] for name in names] for names in (parameter.weights, parameter.biases))
            vector = parameter.is_vector
            if parameter.experts:
                weights = [rows_of(weights[0], parameter.interleaved)]
                biases = [parameter.rows_of_experts(biases[0]).reshape(-1)]
            values[parameter.key] = (
                paddle.to_tensor(weights[0].reshape(-1))
                if vector
                else one.pack_linear(weights, biases if biases else None)
            )
        cache = new_kv_cache(one, model.config, 32, BLOCK)
        layers = model.assemble(values).layers
        found.append(one.decoder_layers(paddle.to_tensor(x), layers, cache, batch, routing=routing).numpy())
    scale = np.abs(found[0]).max()
    np.testing.assert_allclose(found[1], found[0], atol=scale * (1e-5 if dtype == "float32" else 0.03))


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_selected_rows_equal_those_of_the_whole_batch_and_the_cache_is_complete(ops, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((50, layer.hidden)).astype(np.float32)
    caches = [layer.cache(ops, 2) for _ in range(2)]
    batch = make_batch([0, 1], [0, 0], [30, 20])
    rows = np.array([7, 29, 49], np.int64)
    whole = ops.decoder_layers(paddle.to_tensor(x), [packed], caches[0], batch).numpy()
    some = ops.decoder_layers(paddle.to_tensor(x), [packed], caches[1], batch, rows).numpy()
    np.testing.assert_array_equal(some, whole[rows])
    none = ops.decoder_layers(paddle.to_tensor(x), [packed], caches[1], batch, rows[:0])
    assert none.shape == [0, layer.hidden]
    later, step = make_batch([0, 1], [30, 20], [1, 1]), rng.standard_normal((2, layer.hidden)).astype(np.float32)
    found = [ops.decoder_layers(paddle.to_tensor(step), [packed], cache, later).numpy() for cache in caches]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_sequence_has_the_same_bits_alone_among_32_and_in_any_chunks(ops, threads, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((32 * 9, layer.hidden)).astype(np.float32)
    together = ops.decoder_layers(
        paddle.to_tensor(x), [packed], layer.cache(ops, 32), make_batch(list(range(32)), [0] * 32, [9] * 32)
    ).numpy()
    for sequence, count in ((0, 1), (13, 2), (31, 3)):
        ops.set_num_threads(count)
        mine, cache = slice(sequence * 9, sequence * 9 + 9), layer.cache(ops, 1)
        alone = ops.decoder_layers(paddle.to_tensor(x[mine]), [packed], cache, make_batch([0], [0], [9])).numpy()
        np.testing.assert_array_equal(alone, together[mine])
        cache, parts = layer.cache(ops, 1), []
        for start, length in ((0, 4), (4, 1), (5, 4)):
            part = paddle.to_tensor(x[mine][start : start + length])
            parts.append(ops.decoder_layers(part, [packed], cache, make_batch([0], [start], [length])).numpy())
        np.testing.assert_array_equal(np.concatenate(parts), alone)


@pytest.mark.covers("isa dtype", "isa layer", "dtype layer")
def test_a_row_with_nan_leaves_the_other_sequences_alone(ops, rng, layer):
    packed, x = layer.on(ops), rng.standard_normal((40, layer.hidden)).astype(np.float32)
    batch = make_batch(list(range(40)), [0] * 40, [1] * 40)
    clean = ops.decoder_layers(paddle.to_tensor(x), [packed], layer.cache(ops, 40), batch).numpy()
    x[17] = np.nan
    dirty = ops.decoder_layers(paddle.to_tensor(x), [packed], layer.cache(ops, 40), batch).numpy()
    assert np.isnan(dirty[17]).all()
    np.testing.assert_array_equal(np.delete(dirty, 17, 0), np.delete(clean, 17, 0))


@pytest.mark.parametrize("rows,width", [(1, 896), (3, 17), (65, 100), (40, 4096)])
def test_logits_agree_with_the_reference(ops, reference, dtype, rng, rows, width):
    x = (rng.standard_normal((rows, width)) * 3).astype(np.float32)
    norm, head = rng.uniform(0.5, 1.5, width).astype(np.float32), rng.standard_normal((50, width)).astype(np.float32)
    actual, expected = (
        one.logits(paddle.to_tensor(x), paddle.to_tensor(norm), 1e-6, one.pack_linear([head])).numpy()
        for one in (ops, reference)
    )
    rtol = 1e-5 if dtype == "float32" else 1e-2  # the normed rows are rounded to bfloat16
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_logits_of_a_row_have_the_same_bits_in_any_batch(ops, threads, rng):
    x, norm = rng.standard_normal((200, 900)).astype(np.float32), paddle.ones([900])
    head = ops.pack_linear([rng.standard_normal((77, 900)).astype(np.float32)])
    together = ops.logits(paddle.to_tensor(x), norm, 1e-6, head).numpy()
    for count in (1, 3):
        ops.set_num_threads(count)
        for rows in (slice(0, 1), slice(199, 200), slice(3, 50)):
            np.testing.assert_array_equal(
                ops.logits(paddle.to_tensor(x[rows]), norm, 1e-6, head).numpy(), together[rows]
            )


def test_layers_run_in_order_and_an_error_between_them_ends_the_step(ops, reference, rng):
    layer, batch = Layer(rng, *SHAPES["small"]), make_batch([0], [0], [5])
    x, rows = rng.standard_normal((5, layer.hidden)).astype(np.float32), np.array([4], np.int64)
    for one in (ops, reference):
        first = layer.on(one)
        layers = [with_attention(first, layer=i) for i in range(3)]
        expected, cache = paddle.to_tensor(x), one.new_kv_cache(3, 16, BLOCK, layer.kv_heads, layer.dim)
        for i in range(3):
            expected = one.decoder_layers(expected, layers[i : i + 1], cache, batch, rows if i == 2 else None)
        calls: list[int] = []
        found = one.decoder_layers(paddle.to_tensor(x), layers, cache, batch, rows, lambda calls=calls: calls.append(1))
        assert len(calls) == 3
        np.testing.assert_array_equal(found.numpy(), expected.numpy())

        def interrupt(calls=calls) -> None:
            calls.append(1)
            if len(calls) == 5:
                raise InterruptedError("the second of this step")

        with pytest.raises(InterruptedError, match="the second of this step"):
            one.decoder_layers(paddle.to_tensor(x), layers, cache, batch, rows, interrupt)
        assert len(calls) == 5
        again = one.decoder_layers(paddle.to_tensor(x), layers, cache, batch, rows)
        np.testing.assert_array_equal(again.numpy(), expected.numpy())


def test_a_layer_may_have_its_blocks_in_any_order_and_number(ops, reference, rng):
    layer, x = Layer(rng, *SHAPES["small"]), rng.standard_normal((5, 64)).astype(np.float32)
    rows, found = np.array([1, 4], np.int64), []
    for one in (ops, reference):
        attention, mlp = layer.on(one).blocks
        layers, cache = [DecoderLayer((mlp, attention)), DecoderLayer((mlp, mlp))], layer.cache(one, 1)
        found.append(one.decoder_layers(paddle.to_tensor(x), layers, cache, make_batch([0], [0], [5]), rows).numpy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-3 if ops.dtype == "float32" else 0.5)


def test_a_batch_that_grows_row_by_row_seldom_allocates_logits_anew(ops, rng, monkeypatch):
    allocated, empty = [], cpu._empty
    monkeypatch.setattr(cpu, "_empty", lambda shape: allocated.append(shape[0]) or empty(shape))
    norm, head = paddle.ones([16]), ops.pack_linear([rng.standard_normal((20, 16)).astype(np.float32)])
    for rows in range(1, 200):
        assert ops.logits(paddle.zeros([rows, 16]), norm, 1e-6, head).shape == [rows, 20]
    assert allocated == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    other = ops.pack_linear([rng.standard_normal((21, 16)).astype(np.float32)])
    assert ops.logits(paddle.zeros([3, 16]), norm, 1e-6, other).shape == [3, 21]
    assert allocated[-1] == 4


def test_a_batch_is_checked_again_for_another_cache_and_for_other_rope_tables(ops, rng):
    layer = Layer(rng, *SHAPES["small"])
    packed, batch, x = layer.on(ops), make_batch([0], [0], [20]), paddle.zeros([20, layer.hidden])
    roomy = layer.cache(ops, 1)
    ops.decoder_layers(x, [packed], roomy, batch)
    with pytest.raises(AssertionError):
        ops.decoder_layers(x, [packed], ops.new_kv_cache(1, 1, BLOCK, layer.kv_heads, layer.dim), batch)
    rope = {"rope_cos": layer.rope[0][:19].clone(), "rope_sin": layer.rope[1][:19].clone()}
    short = with_attention(packed, **rope)
    with pytest.raises(AssertionError):
        ops.decoder_layers(x, [short], roomy, batch)
    with pytest.raises(AssertionError):
        ops.attention(paddle.zeros([20, packed.blocks[0].qkv.out_features]), roomy, batch, short.blocks[0].attention)
    ops.decoder_layers(x, [packed], roomy, batch)


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": np.arange(236, 256 + 1, dtype=np.int32)},  # the rope tables and the block table end at 256
        {"positions": np.arange(-1, 20, dtype=np.int32)},
        {"positions": np.arange(21, dtype=np.int64)},
        {"starts": np.array([240], np.int32)},
        {"starts": np.array([-1], np.int32)},
        {"block_tables": np.zeros((1, 1), np.int32)},
        {"block_tables": np.full((1, 16), 16, np.int32)},
        {"block_tables": np.full((1, 16), -1, np.int32)},
        {"cu_tokens": np.array([0, 20], np.int32)},
        {"cu_tokens": np.array([0, 30, 21], np.int32), "starts": np.zeros(2, np.int32),
         "block_tables": np.zeros((2, 16), np.int32)},
    ],
    ids=lambda fields: " ".join(f"{name}={np.asarray(value).ravel()[-1]}" for name, value in fields.items()),
)  # fmt: skip
def test_a_batch_that_would_reach_outside_its_memory_is_refused(ops, rng, wrong):
    layer = Layer(rng, *SHAPES["small"])
    packed, cache, right = layer.on(ops), layer.cache(ops, 1), make_batch([0], [0], [21])
    with pytest.raises(AssertionError):
        ops.decoder_layers(paddle.zeros([21, layer.hidden]), [packed], cache, right._replace(**wrong))
    ops.decoder_layers(paddle.zeros([21, layer.hidden]), [packed], cache, right)


@pytest.mark.parametrize(
    "residual",
    [
        lambda hidden: paddle.zeros([20, hidden], "float64"),
        lambda hidden: paddle.zeros([20, hidden], "bfloat16"),
        lambda hidden: paddle.zeros([hidden, 20]).T,
        lambda hidden: paddle.zeros([20, 2 * hidden])[:, :hidden],
        lambda hidden: paddle.zeros([19, hidden]),
        lambda hidden: paddle.zeros([20, hidden - 1]),
    ],
    ids=["float64", "bfloat16", "transposed", "strided", "a row short", "a column short"],
)
def test_a_residual_of_another_type_or_layout_is_refused(ops, rng, residual):
    layer = Layer(rng, *SHAPES["small"])
    with pytest.raises(AssertionError):
        ops.decoder_layers(residual(layer.hidden), [layer.on(ops)], layer.cache(ops, 1), make_batch([0], [0], [20]))
