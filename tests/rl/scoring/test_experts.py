"""A mixture of experts in the scorer: its own routing, the rows that a server returned, and gradients of both."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import RoutedExperts
from fastdeploy.model_executor.ops.blocks import ExpertsBlock, PackedLinear, RouterScore, RouterSpec
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.model_executor.ops.reference_experts import mixture
from fastdeploy.rl.scoring import Scorer
from fastdeploy.rl.scoring import decoder as differentiable
from fastdeploy.rl.scoring.leaves import Leaf
from rl.scoring.loop import LENGTH, Loop, Rollout, assert_no_mismatch, bits
from rl.scoring.plain import plain_logprobs
from rl.scoring.test_gradients import assert_close, samples, upstream_of

EXPERTS, HIDDEN, INNER, TOP_K, ROWS = 12, 32, 16, 3, 40
BIAS = np.linspace(-0.3, 0.3, EXPERTS).astype(np.float32)
SPECS = {
    "softmax": RouterSpec(0, TOP_K, RouterScore.SOFTMAX),
    "softmax, normalised": RouterSpec(0, TOP_K, RouterScore.SOFTMAX, normalize=1),
    "sigmoid, groups, scale": RouterSpec(0, TOP_K, RouterScore.SIGMOID, 4, 2, normalize=1, scale=2.5),
    "softmax of the chosen": RouterSpec(0, TOP_K, RouterScore.SOFTMAX_OF_CHOSEN, scale=0.5),
}
SHAPES = {
    "router": (EXPERTS, HIDDEN),
    "gate_up": (EXPERTS * 2 * INNER, HIDDEN),
    "down": (EXPERTS * HIDDEN, INNER),
    "shared_gate_up": (2 * INNER, HIDDEN),
    "shared_down": (HIDDEN, INNER),
}


def as_leaf(weight: np.ndarray, bias: np.ndarray | None) -> Leaf:
    tensors = [None if one is None else paddle.to_tensor(one, stop_gradient=False) for one in (weight, bias)]
    return Leaf(*tensors, *weight.shape, weight.nbytes)


class Weights:
    """Random weights of a block with experts, with or without biases and a shared MLP."""

    def __init__(self, spec: RouterSpec, whole: bool):
        rng = np.random.default_rng(3)
        self.spec = spec._replace(bias=paddle.to_tensor(BIAS)) if whole else spec
        self.arrays = {
            name: (
                (2 * rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32),
                rng.standard_normal(shape[0]).astype(np.float32) if whole and name != "router" else None,
            )
            for name, shape in SHAPES.items()
            if whole or not name.startswith("shared")
        }

    def block(self, linears: dict[str, PackedLinear]) -> ExpertsBlock:
        return ExpertsBlock(norm=paddle.ones([HIDDEN]), norm_eps=1e-6, routing=self.spec, **linears)

    def plain(self, leaves: dict[str, Leaf], x: paddle.Tensor, chosen: np.ndarray) -> paddle.Tensor:
        """Compute every expert for every row."""

        def mlp(gate_up: str, down: str, parts: int, i: int) -> paddle.Tensor:
            y = x
            for name in (gate_up, down):
                size = leaves[name].out_features // parts
                y = y @ leaves[name].weight[i * size : (i + 1) * size].T
                if leaves[name].bias is not None:
                    y = y + leaves[name].bias[i * size : (i + 1) * size]
                if name == gate_up:
                    y = paddle.nn.functional.silu(y[:, :INNER]) * y[:, INNER:]
            return y

        spec, logits = self.spec, x @ leaves["router"].weight.T
        mask = np.zeros((len(chosen), EXPERTS), np.float32)
        np.put_along_axis(mask, chosen, 1, 1)
        mask = paddle.to_tensor(mask)
        scores = 1 / (1 + paddle.exp(-logits)) if spec.score is RouterScore.SIGMOID else paddle.exp(logits)
        if spec.score is RouterScore.SOFTMAX:
            scores = scores / scores.sum(1, keepdim=True)
        weights = scores * mask
        if spec.normalize or spec.score is RouterScore.SOFTMAX_OF_CHOSEN:
            weights = weights / weights.sum(1, keepdim=True)
        y = sum(weights[:, i : i + 1] * mlp("gate_up", "down", EXPERTS, i) for i in range(EXPERTS)) * spec.scale
        return y + mlp("shared_gate_up", "shared_down", 1, 0) if "shared_down" in leaves else y


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_block_has_the_values_of_the_reference_and_the_gradients_of_all_experts_for_all_rows(name, whole):
    weights, ops = Weights(SPECS[name], whole), ReferenceOps("float32")
    rng = np.random.default_rng(4)
    rows, upstream = (rng.standard_normal((ROWS, HIDDEN)).astype(np.float32) for _ in range(2))
    packed = {n: ops.pack_linear([w], None if bias is None else [bias]) for n, (w, bias) in weights.arrays.items()}
    chosen = np.zeros((ROWS, TOP_K), np.uint16)
    wanted = mixture(paddle.to_tensor(rows), weights.block(packed), chosen, False).numpy()
    found = []
    for plain in (True, False):
        leaves = {n: as_leaf(*pair) for n, pair in weights.arrays.items()}
        x = paddle.to_tensor(rows, stop_gradient=False)
        if plain:
            out = weights.plain(leaves, x, chosen.astype(np.int64))
        else:
            padding = np.full((2, TOP_K), differentiable.NO_EXPERT)  # behind the rows
            routing = np.concatenate([chosen, padding])[:, None]
            batch = differentiable._Batch(1, ROWS + 2, routing)
            out = differentiable._experts(paddle.concat([x, paddle.ones([2, HIDDEN])]), weights.block(leaves), batch)
            out = out[:ROWS]
        np.testing.assert_allclose(out.numpy(), wanted, atol=1e-5 * np.abs(wanted).max())
        (out * paddle.to_tensor(upstream)).sum().backward()
        tensors = {n: leaf.weight for n, leaf in leaves.items()} | {"x": x}
        tensors |= {f"{n} bias": leaf.bias for n, leaf in leaves.items() if leaf.bias is not None}
        found.append({n: tensor.grad.numpy() for n, tensor in tensors.items()})
    assert_close(found[1], found[0], 1e-5)
    assert np.abs(found[0]["router"]).max() > 0


def rows_of(loop: Loop, rollouts: list[Rollout]) -> list[np.ndarray]:
    """Return the routed experts that the engine returned."""
    return [RoutedExperts(loop.engine.runner.info.experts, one.routed).array() for one in rollouts]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(("qwen3_moe", dtype) for dtype in ("float32", "bfloat16", "int8")),
        *((model, "bfloat16") for model in ("ernie_moe", "glm_moe", "deepseek", "gpt_oss")),
    ],
)
def test_the_own_routing_and_the_rows_of_the_server_give_its_log_probabilities(checkpoints, tmp_path, model, dtype):
    loop = Loop(checkpoints[model], dtype, tmp_path, routed_experts=True)
    for _ in range(2):
        rollouts = loop.finish(loop.begin())
        assert all(len(one.tokens) == LENGTH for one in rollouts)
        rows = rows_of(loop, rollouts)
        assert_no_mismatch(loop.scorer, rollouts)
        assert_no_mismatch(loop.scorer, rollouts, routed_experts=rows)
        assert_no_mismatch(loop.scorer, rollouts, routed_experts=[r if i % 3 else None for i, r in enumerate(rows)])
        loop.train(rollouts)
        loop.publish(kv="recompute")
    assert loop.engine.engine.kv.hit_tokens > 0 and loop.engine.engine.scheduler.num_preemptions > 0


def test_the_backward_pass_takes_the_experts_of_the_forward_pass(checkpoints, tmp_path):
    """Rows that the server returned, and an own routing that equals them, give the same gradients to the bit."""
    loop = Loop(checkpoints["qwen3_moe"], "bfloat16", tmp_path, routed_experts=True)
    rollouts = loop.finish(loop.begin())
    found = []
    for routed_experts in (None, rows_of(loop, rollouts)):
        loop.scorer.logprobs([one.sample for one in rollouts], routed_experts=routed_experts).sum().backward()
        found.append({name: tensor.grad.numpy().copy() for name, tensor in loop.scorer.parameters.items()})
        for tensor in loop.scorer.parameters.values():
            tensor.clear_grad()
    for name, one in found[0].items():
        np.testing.assert_array_equal(bits(found[1][name]), bits(one), err_msg=name)
    assert np.abs(found[0]["model.layers.0.mlp.gate.weight"]).max() > 0


def test_gradients_of_the_own_routing_are_those_of_plain_paddle(checkpoints):
    folder = str(checkpoints["qwen3_moe"])
    scorer = Scorer(folder, "float32")
    logprobs = scorer.logprobs(samples())
    upstream = upstream_of(logprobs.shape[0])
    (logprobs * upstream).sum().backward()
    tensors = {name: paddle.to_tensor(t.numpy(), stop_gradient=False) for name, t in scorer.parameters.items()}
    plain = plain_logprobs(folder, tensors, samples(), 1.0)
    (plain * upstream).sum().backward()
    np.testing.assert_allclose(logprobs.numpy(), plain.numpy(), atol=1e-4)
    assert_close(*({n: t.grad.numpy() for n, t in of.items()} for of in (scorer.parameters, tensors)), 1e-5)


GOOD = np.tile(np.arange(2), (4, 2, 1))  # of 3 + 2 tokens, 2 layers with experts, 2 experts of a token


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ([GOOD], "routed_experts"),
        ([GOOD, GOOD[1:]], "routed_experts[1]"),
        ([GOOD, GOOD[:, :1]], "routed_experts[1]"),
        ([GOOD, GOOD.astype(np.float32)], "routed_experts[1]"),
        ([GOOD, [[1, 2], [3]]], "routed_experts[1]"),
        ([GOOD, GOOD + 5], "routed_experts[1]"),
        ([GOOD - 1, None], "routed_experts[0]"),
        ([None, GOOD * 0], "routed_experts[1]"),
    ],
)
def test_rows_that_no_router_can_choose_are_refused_by_name(checkpoints, bad, field):
    scorer, sequences = Scorer(str(checkpoints["qwen3_moe"])), [([5, 6, 7], [8, 9])] * 2
    with pytest.raises(InvalidField) as caught:
        scorer.logprobs(sequences, routed_experts=bad)
    assert caught.value.field == field
    assert scorer.logprobs(sequences, routed_experts=[GOOD, None]).shape == [4]


def test_a_dense_model_refuses_rows(checkpoints):
    with pytest.raises(InvalidField, match="no experts"):
        Scorer(str(checkpoints["qwen2"])).logprobs([([5], [6])], routed_experts=[None])
