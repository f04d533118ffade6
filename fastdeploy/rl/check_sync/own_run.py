"""A run of our own on the trainer's weights: log probabilities by the model code and the ops of the server. And weights
that such a run is given: the trainer's in float32, and with errors of a known size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fastdeploy.core.serving_dtype import widen
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.rl.scoring.distribution import Distribution
from fastdeploy.rl.scoring.engine_forward import EngineForward
from fastdeploy.rl.scoring.samples import Sample
from fastdeploy.rl.scoring.scorer import Packer

FORWARD_TOKENS = 8192  # of one batch


class OwnRun:
    """The model of ``trainer`` in one dtype. dtype: of activations; the weights keep the rounding of the trainer's
    serving dtype. tensors: float32 values by name, rounded so. has_experts: the model is a Mixture of Experts."""

    def __init__(self, trainer: TrainerWeights, dtype: str, quantization: str | None = None):
        config = load_config(trainer.model_folder)
        model = build_model(config, get_ops(dtype), config.max_position_embeddings, quantization)
        experts = experts_of_config(config)
        self.has_experts = experts is not None
        self._packer = Packer(model)
        self._forward = EngineForward(model, FORWARD_TOKENS, experts)
        self.load(widened(trainer))

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Replace all tensors. Raises WeightUpdateRefused for a value that is not finite."""
        self.tensors = tensors
        self._packed = self._packer.pack(tensors)

    def logprobs(self, sequences: Sequence[Sequence[int]], given: Sequence[int]) -> np.ndarray:
        """Return the log probability of each token of the sequences but their first ``given[i]``, float64, in one
        array. Raises NonFiniteLogits."""
        found, _ = self._forward.logprobs(self._packed, _samples(sequences, given), Distribution(), False)
        return found.astype(np.float64)

    def best(self, sequences: Sequence[Sequence[int]], given: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the best token in the place of each of these tokens and its log probability: int32 and float64."""
        ids, values = self._forward.top_logprobs(self._packed, _samples(sequences, given), Distribution(), 1)
        return ids[:, 0], values[:, 0].astype(np.float64)


def widened(trainer: TrainerWeights) -> dict[str, np.ndarray]:
    """Return the trainer's tensors by name in float32, rounded to the serving dtype."""
    return {name: widen(values) for name, values in trainer.arrays(trainer.shapes)}


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the tensors that play the same part in each layer, and for each expert. A kind is such a name
    with * in place of the numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return found


def with_error(
    tensors: Mapping[str, np.ndarray], names: Iterable[str], size: float, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return the tensors with normal noise added to those in ``names``: of ``size`` times the root mean square of the
    tensor."""
    rng, changed = np.random.default_rng(seed), dict(tensors)
    for name in names:
        values = tensors[name]
        scale = size * float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        changed[name] = (values + scale * rng.standard_normal(values.shape)).astype(np.float32)
    return changed


def _samples(sequences: Sequence[Sequence[int]], given: Sequence[int]) -> list[Sample]:
    samples, first = [], 0
    for ids, prompt in zip(sequences, given, strict=True):
        samples.append(Sample(np.asarray(ids, np.int32), prompt, first))
        first += len(ids) - prompt
    return samples
