"""Gradients of the parameters from gradients of the log probabilities.

The engine's ops have no gradients. So the backward pass computes the samples again with the plain decoder, at the same
rounded weights and in float32, and differentiates that. The gradient passes straight through the rounding of a weight
to the serving dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.parameters import Value
from fastdeploy.rl.scoring.decoder import NO_EXPERT, Decoder
from fastdeploy.rl.scoring.distribution import Distribution
from fastdeploy.rl.scoring.leaves import gradients_of, leaf_of
from fastdeploy.rl.scoring.samples import Sample

LOGITS = 1 << 22  # logits that are in memory at once
EXCLUDED = -1e30  # its probability is 0. With -inf the gradients would be NaN
STRIDES = "FLAGS_use_stride_kernel"


class Backward:
    """The computation of gradients. max_tokens: of one micro-batch with its padding, unless a single sample is
    longer."""

    def __init__(self, model: Model, max_tokens: int):
        self._model, self._decoder, self._max_tokens = model, Decoder(model), max_tokens

    def gradients(
        self, rounded: Mapping[str, paddle.Tensor], samples: Sequence[Sample], over: Distribution, upstream: np.ndarray
    ) -> dict[str, paddle.Tensor]:
        """Return the gradient of each tensor, float32, by name. rounded: the weights, by name. upstream: the gradient
        of each log probability, float32 [output tokens]. Samples whose gradients are all 0 cost nothing."""
        if not upstream.any():
            return {name: paddle.zeros(tensor.shape, "float32") for name, tensor in rounded.items()}
        leaves = {p.key: leaf_of(p, rounded) for p in self._model.parameters}
        used = [s for s in samples if upstream[s.first : s.first + s.output].any()]
        with paddle.enable_grad(), without_strides():
            for batch in micro_batches(used, self._max_tokens):
                self._add_batch(leaves, batch, over, upstream)
            found: dict[str, paddle.Tensor] = {}
            for parameter in self._model.parameters:
                found |= gradients_of(parameter, leaves[parameter.key])
            return found

    def _add_batch(
        self, leaves: Mapping[str, Value], batch: Sequence[Sample], over: Distribution, upstream: np.ndarray
    ) -> None:
        """Add the gradients of one micro-batch to those that the leaves have collected. The logits are computed in
        slices, since those of a large vocabulary take more memory than the rest."""
        weights = self._model.assemble(leaves)
        ids, rows, targets, experts = padded(batch)
        places = np.concatenate([np.arange(s.first, s.first + s.output) for s in batch])
        wanted = upstream[places]
        hidden = self._decoder.hidden(weights, paddle.to_tensor(ids), paddle.to_tensor(rows), experts)
        scored = hidden.detach()
        scored.stop_gradient = False
        step = max(1, LOGITS // self._model.config.vocab_size)
        for at in range(0, len(rows), step):
            logits = self._decoder.logits(weights, scored[at : at + step])
            if over.temperature not in (0.0, 1.0):
                logits = logits / over.temperature
            logits = over.masked(logits, places[at : at + step], EXCLUDED)
            losses = F.cross_entropy(logits, paddle.to_tensor(targets[at : at + step]), reduction="none")
            losses.reshape([-1]).backward(paddle.to_tensor(-wanted[at : at + step]))
        hidden.backward(scored.grad)


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Yield the samples in micro-batches of like length, the longest first. Each has at most ``max_tokens`` tokens with
    its padding, unless a single sample is longer."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -sample.rows):
        if batch and (len(batch) + 1) * batch[0].rows > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


class Padded(NamedTuple):
    """A micro-batch. ids: int64 [B, T], padded with 0. rows: of the flattened ids, those that predict an output token.
    targets: these output tokens, int64. experts: of the flattened ids, int64 [B * T, experts layers, top_k], NO_EXPERT
    for padding; None without a routing."""

    ids: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    experts: np.ndarray | None


def padded(batch: Sequence[Sample]) -> Padded:
    """Return the arrays of a micro-batch, whose first sample is the longest."""
    length = batch[0].rows
    ids = np.zeros((len(batch), length), np.int64)
    for row, sample in zip(ids, batch, strict=True):
        row[: sample.rows] = sample.ids[:-1]
    rows = [i * length + np.arange(sample.prompt - 1, sample.rows) for i, sample in enumerate(batch)]
    targets = np.concatenate([sample.ids[sample.prompt :] for sample in batch]).astype(np.int64)
    return Padded(ids, np.concatenate(rows), targets, _padded_experts(batch))


def _padded_experts(batch: Sequence[Sample]) -> np.ndarray | None:
    if batch[0].routing is None:
        return None
    experts = np.full((len(batch), *batch[0].routing.shape), NO_EXPERT, np.int64)
    for rows, sample in zip(experts, batch, strict=True):
        rows[: sample.rows] = sample.routing
    return experts.reshape(-1, *experts.shape[2:])


@contextmanager
def without_strides() -> Iterator[None]:
    """Let Paddle copy instead of making strided views, with which the backward pass takes twice as long on a CPU. Every
    tensor that is used inside must be contiguous."""
    before = paddle.get_flags(STRIDES)
    paddle.set_flags({STRIDES: False})
    try:
        yield
    finally:
        paddle.set_flags(before)
