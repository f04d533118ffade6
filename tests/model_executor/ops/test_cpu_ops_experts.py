"""A mixture of experts in the C++ ops: the reference's choice and result, and rows that do not depend on others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.ops.blocks import DecoderLayer, ExpertsBlock, RouterScore, RouterSpec
from fastdeploy.model_executor.ops.interface import Routing
from tests.support.decoder_layers import SHAPES, Layer, make_batch

EXPERTS, HIDDEN, INNER, TOP_K = 12, 64, 48, 3
SPECS = {
    "softmax": RouterSpec(0, TOP_K, RouterScore.SOFTMAX),
    "softmax, normalised": RouterSpec(0, TOP_K, RouterScore.SOFTMAX, normalize=1),
    "softmax with a bias": RouterSpec(0, TOP_K, RouterScore.SOFTMAX, normalize=1, bias=paddle.linspace(-0.2, 0.2, 12)),
    "sigmoid, groups, scale": RouterSpec(
        0, TOP_K, RouterScore.SIGMOID, 4, 2, normalize=1, scale=2.5, bias=paddle.linspace(-0.1, 0.1, 12)
    ),
    "softmax of the chosen": RouterSpec(0, TOP_K, RouterScore.SOFTMAX_OF_CHOSEN),
}


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return the type of the weights: int8 beside bfloat16, too."""
    return request.param


class Mixture:
    """Random weights of a layer with experts; ``on(ops)`` packs them."""

    def __init__(self, rng, spec: RouterSpec, shared: bool = False, biased: bool = False):
        def weight(n: int, k: int, scale: float = 1.0) -> np.ndarray:
            return (scale * rng.standard_normal((n, k)) / k**0.5).astype(np.float32)

        self.spec, self._attention = spec, Layer(rng, *SHAPES["small"])
        sizes = [(EXPERTS * 2 * INNER, HIDDEN), (EXPERTS * HIDDEN, INNER)]
        sizes += [(2 * INNER, HIDDEN), (HIDDEN, INNER)] if shared else []
        biases = [rng.standard_normal(n).astype(np.float32) if biased else None for n, _ in sizes]
        self._experts = [(weight(*size), bias) for size, bias in zip(sizes, biases, strict=True)]
        self._router = weight(EXPERTS, HIDDEN, 2.0)

    def on(self, ops, router: np.ndarray | None = None) -> DecoderLayer:
        attention, mlp = self._attention.on(ops).blocks
        packed = [ops.pack_linear([w], None if bias is None else [bias]) for w, bias in self._experts]
        gate_up, down, *shared = packed
        block = ExpertsBlock(
            mlp.norm, 1e-6, ops.pack_linear([self._router if router is None else router]), self.spec, gate_up, down
        )
        if shared:
            block = replace(block, shared_gate_up=shared[0], shared_down=shared[1])
        return DecoderLayer((attention, block))

    def run(
        self, ops, layer: DecoderLayer, x: np.ndarray, routing: Routing | None = None, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute each row as a sequence of its own, and return ``rows``."""
        count = len(x)
        batch = make_batch(list(range(count)), [0] * count, [1] * count)
        cache = self._attention.cache(ops, count)
        return ops.decoder_layers(paddle.to_tensor(x), [layer], cache, batch, rows, routing=routing).numpy()


def new_routing(rows: int) -> Routing:
    return Routing(np.zeros((rows, 1, TOP_K), np.uint16))


@pytest.mark.covers("isa dtype name", "isa dtype biased", "name biased")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_experts_are_those_of_the_reference_with_its_weights(ops, reference, dtype, rng, name, biased):
    mixture, x = Mixture(rng, SPECS[name], shared=biased, biased=biased), rng.standard_normal((70, HIDDEN))
    found, chosen = [], []
    for one in (ops, reference):
        routing = new_routing(70)
        found.append(mixture.run(one, mixture.on(one), x.astype(np.float32), routing))
        chosen.append(routing.experts)
    same = (chosen[0] == chosen[1]).all(axis=(1, 2))
    assert same.mean() > (0.99 if dtype == "float32" else 0.8)  # bfloat16 rounds the router's input
    assert len(np.unique(chosen[0])) > TOP_K
    scale = np.abs(found[1]).max()
    np.testing.assert_allclose(found[0][same], found[1][same], atol=scale * (1e-5 if dtype == "float32" else 0.03))


@pytest.mark.parametrize("name", ["softmax, normalised", "sigmoid, groups, scale"])
def test_a_row_has_the_same_bits_and_experts_alone_and_among_others(ops, threads, dtype, rng, name):
    mixture, x = Mixture(rng, SPECS[name], shared=True), rng.standard_normal((300, HIDDEN)).astype(np.float32)
    layer, routing = mixture.on(ops), new_routing(300)
    together = mixture.run(ops, layer, x, routing)
    for rows, count in (([0], 1), ([299], 3), ([17, 250, 3], 2), (range(40, 80), 3)):
        ops.set_num_threads(count)
        alone = new_routing(len(rows))
        np.testing.assert_array_equal(mixture.run(ops, layer, x[list(rows)], alone), together[list(rows)])
        np.testing.assert_array_equal(alone.experts, routing.experts[list(rows)])
        np.testing.assert_array_equal(mixture.run(ops, layer, x[list(rows)]), together[list(rows)])


@pytest.mark.covers("isa dtype", "isa kept", "dtype kept")
@pytest.mark.parametrize("kept", [[], [7], [0, 3, 69]])
def test_the_routing_is_that_of_all_rows_though_only_some_are_computed(ops, reference, dtype, rng, kept):
    mixture, x = Mixture(rng, SPECS["softmax"], shared=True), rng.standard_normal((70, HIDDEN)).astype(np.float32)
    rows = np.array(kept, np.int64)
    for one in (ops, reference):
        layer, of_all, of_some = mixture.on(one), new_routing(70), new_routing(70)
        whole = mixture.run(one, layer, x, of_all)
        np.testing.assert_array_equal(mixture.run(one, layer, x, of_some, rows), whole[rows])
        np.testing.assert_array_equal(of_some.experts, of_all.experts)
        forced = of_all._replace(forced=True)
        np.testing.assert_array_equal(mixture.run(one, layer, x, forced, rows), whole[rows])


@pytest.mark.covers("isa", "dtype")
def test_forced_experts_give_the_bits_of_the_own_choice_and_others_give_theirs(ops, reference, dtype, rng):
    mixture, x = Mixture(rng, SPECS["softmax"]), rng.standard_normal((33, HIDDEN)).astype(np.float32)
    for one in (ops, reference):
        layer, routing = mixture.on(one), new_routing(33)
        own = mixture.run(one, layer, x, routing)
        np.testing.assert_array_equal(mixture.run(one, layer, x, Routing(routing.experts.copy(), True)), own)
        changed = routing.experts.copy()
        changed[::2] = (changed[::2] + 1) % EXPERTS
        told = Routing(changed.copy(), forced=True)
        found = mixture.run(one, layer, x, told)
        np.testing.assert_array_equal(found[1::2], own[1::2])
        assert (found[::2] != own[::2]).any(axis=1).all()
        np.testing.assert_array_equal(told.experts, changed)


@pytest.mark.covers("isa", "dtype")
def test_weights_are_divided_by_their_sum_or_by_the_least_divisor(ops, reference, rng):
    x = rng.standard_normal((5, HIDDEN)).astype(np.float32)
    for one in (ops, reference):
        found = []
        for least in (1e-12, 2.0):  # the sum is at most 1
            mixture = Mixture(np.random.default_rng(3), SPECS["softmax, normalised"]._replace(norm_min=least))
            layer = mixture.on(one)
            attended = mixture.run(one, DecoderLayer(layer.blocks[:1]), x)
            found.append(mixture.run(one, layer, x) - attended)
        plain = Mixture(np.random.default_rng(3), SPECS["softmax"])
        raw = plain.run(one, plain.on(one), x) - attended
        np.testing.assert_allclose(found[1], raw / 2, atol=1e-2 if one.dtype == "bfloat16" else 1e-5)
        assert np.abs(found[0] - raw).max() > 1e-3


@pytest.mark.covers("isa", "dtype")
def test_of_equal_ranks_the_lower_expert_is_chosen_first(ops, reference, rng):
    for name, spec in SPECS.items():
        mixture, x = Mixture(rng, spec._replace(bias=None)), rng.standard_normal((5, HIDDEN)).astype(np.float32)
        for one in (ops, reference):
            routing = new_routing(5)
            mixture.run(one, mixture.on(one, router=np.zeros((EXPERTS, HIDDEN), np.float32)), x, routing)
            assert (routing.experts == np.arange(TOP_K)).all(), name


@pytest.mark.covers("isa", "dtype")
def test_a_row_with_nan_has_distinct_experts_and_leaves_the_other_rows_alone(ops, reference, rng):
    for spec in SPECS.values():
        mixture, x = Mixture(rng, spec), rng.standard_normal((9, HIDDEN)).astype(np.float32)
        for one in (ops, reference):
            layer, clean = mixture.on(one), mixture.run(one, mixture.on(one), x)
            broken, routing = x.copy(), new_routing(9)
            broken[4, 7] = np.nan
            found = mixture.run(one, layer, broken, routing)
            assert np.isnan(found[4]).any()
            assert len(set(routing.experts[4, 0].tolist())) == TOP_K and routing.experts.max() < EXPERTS
            np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(clean, 4, 0))
