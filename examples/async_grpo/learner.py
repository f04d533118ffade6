"""The learner: scores a batch with the server's own arithmetic, and makes the optimizer's step. Also checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from examples.async_grpo.config import Settings
from examples.async_grpo.grpo import advantages, mismatch, token_loss
from examples.async_grpo.samples import Group, Sample
from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.scoring import Scorer

COMPARED = 16  # answers of each kind whose logprobs are compared with the server's, in each update


class Learner:
    """Trains the weights of ``scorer``, which start as the checkpoint ``settings.model``."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.scorer = Scorer(settings.model, settings.dtype)
        self._reference = Scorer(settings.model, settings.dtype) if settings.kl_weight else None
        self._witness = Scorer(settings.model, settings.dtype)
        self._published: dict[int, dict[str, paddle.Tensor]] = {}  # the weights of the last publications
        self._parameters = self.scorer.parameters
        for name, parameter in self._parameters.items():
            parameter.name = name  # the optimizer's state has these names
        self._optimizer = paddle.optimizer.Adam(
            settings.learning_rate,
            beta2=settings.beta2,
            parameters=list(self._parameters.values()),
            grad_clip=paddle.nn.ClipGradByGlobalNorm(settings.max_grad_norm),
        )

    def update(self, number: int, publication: int, groups: Sequence[Group]) -> dict[str, Any]:
        """Make one update. publication: of the present weights. Returns what happened; values are means over tokens.

        lag: publications that a token's weights lacked. mismatch, stale_kv: see :meth:`_compare`. seconds: by phase.
        """
        samples = [sample for group in groups for sample in group.samples]
        made_by = [sample.publications for sample in samples]  # of each token
        behaviour = np.concatenate([sample.logprobs for sample in samples])
        credits = [np.repeat(advantages(group.rewards), [len(s.logprobs) for s in group.samples]) for group in groups]
        clock = [time.perf_counter()]
        current = scored(self.scorer, samples)
        with paddle.no_grad():
            reference = scored(self._reference, samples) if self._reference else None
            compared = self._compare(publication, samples, made_by)
        clock.append(time.perf_counter())
        losses = token_loss(
            current, paddle.to_tensor(behaviour), reference, paddle.to_tensor(np.concatenate(credits)), self._settings
        )
        losses.loss.backward()
        clock.append(time.perf_counter())
        norms = [float(p.grad.norm()) for p in self._parameters.values() if p.grad is not None]  # before the clip
        self._optimizer.set_lr(self._settings.learning_rate * min(1.0, (number + 1) / self._settings.warmup))
        self._optimizer.step()
        self._optimizer.clear_grad()
        self.scorer.refresh()
        clock.append(time.perf_counter())
        lags = publication - np.concatenate(made_by)
        return {
            "samples": len(samples),
            "tokens": lags.size,
            "lag_mean": float(lags.mean()),
            "lag_max": int(lags.max()),
            **compared,
            "loss": float(losses.loss),
            "kl_reference": float(losses.kl),
            "clipped": float(losses.clipped),
            "grad_norm": float(np.linalg.norm(norms)),
            "seconds": dict(zip(("score", "backward", "optimizer"), np.diff(clock).tolist(), strict=True)),
        }

    def _compare(self, publication: int, samples: Sequence[Sample], made_by: Sequence[np.ndarray]) -> dict[str, Any]:
        """Compare the server's logprobs of some answers with those of the weights that made them.

        The weights are those of the newest publication in the batch, which a copy was kept of. mismatch: of answers
        that these weights made as a whole. stale_kv: of the tokens that they made in answers begun by older weights,
        perhaps over the KV of those.
        """
        self._published[publication] = {name: value.clone() for name, value in self._parameters.items()}
        self._published.pop(publication - self._settings.max_staleness - 1, None)
        newest = max(int(made.max()) for made in made_by)
        whole = [i for i, made in enumerate(made_by) if (made == newest).all()][:COMPARED]
        mixed = [i for i, made in enumerate(made_by) if made[0] < newest == made[-1]][:COMPARED]
        for name, value in self._published[newest].items():
            self._witness.parameters[name].set_value(value)
        self._witness.refresh()
        here = [made_by[i] == newest for i in (*whole, *mixed)]
        some = [samples[i] for i in (*whole, *mixed)]
        trainer = scored(self._witness, some).numpy()
        server = np.concatenate([sample.logprobs for sample in some])
        return mismatches(here, trainer, server)

    def save(self, path: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint: weights and optimizer state in safetensors format, and ``position`` as JSON in its
        metadata. The file replaces the one before in one step, so a killed trainer leaves a whole checkpoint."""
        tensors = {f"weights.{name}": value.numpy() for name, value in self._parameters.items()}
        tensors |= {f"adam.{name}": value.numpy() for name, value in self._optimizer.state_dict().items()}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, {"position": json.dumps(position)})
        partial.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Take over a checkpoint, and return its position. Raises InvalidField if there is none, no whole one, or one
        of another model."""
        try:
            with safe_open(path, "np") as file:
                tensors = {name: paddle.to_tensor(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
                position = json.loads(file.metadata()["position"])
            for name, parameter in self._parameters.items():
                parameter.set_value(tensors.pop("weights." + name))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InvalidField("resume", f"expected a checkpoint of this model at {path}: {error}") from error
        self._optimizer.set_state_dict({name.removeprefix("adam."): value for name, value in tensors.items()})
        self.scorer.refresh()
        return position


def scored(scorer: Scorer, samples: Sequence[Sample]) -> paddle.Tensor:
    """Return the log probability of each sampled token, float32, in the order of the samples."""
    routed = [sample.routed_experts for sample in samples]
    found = scorer.logprobs(
        [(sample.prompt_ids, sample.token_ids) for sample in samples],
        routed_experts=None if any(rows is None for rows in routed) else routed,
    )
    sampled = np.concatenate([sample.sampled for sample in samples])
    return found if sampled.all() else found[paddle.to_tensor(np.flatnonzero(sampled))]


def mismatches(here: Sequence[np.ndarray], trainer: np.ndarray, server: np.ndarray) -> dict[str, Any]:
    """Compare both logprobs of the tokens that one publication made. here: of each answer, which tokens these are, bool
    [tokens]. Only an answer that it made as a whole has no KV of older weights."""
    made = np.concatenate(here)
    whole = np.concatenate([np.full(mask.size, mask.all()) for mask in here])
    mixed = made & ~whole
    return {
        "mismatch": mismatch(trainer[whole], server[whole]),
        "stale_kv": mismatch(trainer[mixed], server[mixed]),
    }
