"""The mixture of experts of the reference ops."""

from __future__ import annotations

import math

import numpy as np
import paddle

from fastdeploy.model_executor.ops.blocks import Activation, ExpertsBlock, PackedLinear, RouterScore, RouterSpec
from fastdeploy.model_executor.ops.reference_tiles import LoraRows, gated, linear_in_tiles
from fastdeploy.model_executor.ops.reference_weights import ReferenceLinear


def gated_mlp(
    x: paddle.Tensor,
    gate_up: PackedLinear,
    down: PackedLinear,
    activation: Activation,
    inner_loras: LoraRows,
    down_loras: LoraRows,
) -> paddle.Tensor:
    """Return down(activation(gate(x), up(x))) with adapters: x [M, K] -> [M, N]."""
    gate, up = paddle.split(linear_in_tiles(x, gate_up, inner_loras), 2, axis=1)
    inner = gated(gate, up, activation)[: x.shape[0]]
    return linear_in_tiles(inner, down, down_loras)[: x.shape[0]]


def mixture(x: paddle.Tensor, block: ExpertsBlock, routing: np.ndarray, forced: bool) -> paddle.Tensor:
    """Return what the experts and the shared MLP make of the normed rows x [M, H]. routing, uint16 [M, top_k]: is
    written, or read if ``forced``; see ``interface.Routing``."""
    logits, rows = linear_in_tiles(x, block.router, [])[: x.shape[0]].numpy(), x.shape[0]
    weights = np.zeros(routing.shape, np.float32)
    for row in range(rows):
        scores = _scores(logits[row], block.routing)
        if not forced:
            routing[row] = _choice(logits[row] if scores is None else scores, block.routing)
        weights[row] = _weights(logits[row], scores, routing[row], block.routing)
    outputs = np.zeros((*routing.shape, x.shape[1]), np.float32)
    for expert in np.unique(routing).tolist():
        of_rows, places = np.nonzero(routing == expert)
        gate_up, down = (_part(packed, expert, block.experts) for packed in (block.gate_up, block.down))
        mine = paddle.index_select(x, paddle.to_tensor(of_rows))
        outputs[of_rows, places] = gated_mlp(mine, gate_up, down, block.activation, [], []).numpy()
    total = np.zeros((rows, x.shape[1]), np.float32)
    for place in range(block.routing.top_k):
        total += weights[:, place, None] * outputs[:, place]
    result = paddle.to_tensor(total)
    if block.shared_gate_up is not None and block.shared_down is not None:
        result = result + gated_mlp(x, block.shared_gate_up, block.shared_down, block.activation, [], [])
    return result


def _part(packed: PackedLinear, number: int, parts: int) -> ReferenceLinear:
    """Return one of ``parts`` equal parts of the rows of a weight."""
    assert isinstance(packed, ReferenceLinear)
    rows = packed.out_features // parts
    here = slice(number * rows, (number + 1) * rows)
    found = ReferenceLinear(packed.weight[here], None if packed.bias is None else packed.bias[here], rows,
                            packed.in_features, packed.nbytes // parts)  # fmt: skip
    if packed.int8 is not None:
        found.quantized, found.int8 = True, packed.int8[here]
    return found


def _exp(x: np.ndarray) -> np.ndarray:
    """Return e^x, number by number: numpy gives another last bit at some positions of an array."""
    return np.array([math.exp(value) for value in x.tolist()], np.float32)


def _scores(logits: np.ndarray, spec: RouterSpec) -> np.ndarray | None:
    """Return the score of each expert, float32; None if scores are those of the chosen only."""
    if spec.score is RouterScore.SOFTMAX_OF_CHOSEN:
        return None
    if spec.score is RouterScore.SIGMOID:
        return np.float32(1) / (np.float32(1) + _exp(-np.clip(logits, -80, 80)))
    return _normalised(_exp(logits - logits.max()), 0.0)


def _normalised(values: np.ndarray, least: float) -> np.ndarray:
    """Divide values by their sum, which is added in order, or by ``least`` if that is larger."""
    total = np.float32(0)
    for value in values:
        total += value
    return values / max(total, np.float32(least))


def _choice(scores: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """Return the chosen experts, best first, and the lower id first among equal ranks."""
    ranks = scores if spec.bias is None else scores + spec.bias.numpy()
    ranks = np.where(np.isnan(ranks), np.finfo(np.float32).min, ranks)
    if spec.groups > 1:
        groups = ranks.reshape([spec.groups, -1])
        with np.errstate(over="ignore"):  # two ranks that are not numbers
            sums = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-sums, kind="stable")[: spec.top_groups]
        inside = np.isin(np.arange(spec.groups), kept).repeat(groups.shape[1])
        ranks = np.where(inside, ranks, -np.inf)
    return np.argsort(-ranks, kind="stable")[: spec.top_k].astype(np.uint16)


def _weights(logits: np.ndarray, scores: np.ndarray | None, chosen: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """Return the weight of each chosen expert, float32."""
    found = _exp(logits[chosen] - logits[chosen].max()) if scores is None else scores[chosen]
    if spec.normalize or scores is None:
        found = _normalised(found, spec.norm_min)
    return found * np.float32(spec.scale)
