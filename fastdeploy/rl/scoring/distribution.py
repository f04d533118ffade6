"""The distribution that tokens are scored in: a temperature, and the tokens that could be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import paddle

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.scoring.samples import Ids, Sample
from fastdeploy.worker.token_logprobs import divisors

SamplingMasks: TypeAlias = "Sequence[Sequence[Ids]]"


class Masks(NamedTuple):
    """The ids that each output token was drawn from: those of token i end at ends[i] (int64) in ids (int32). A token
    without any was drawn from the whole vocabulary."""

    ids: np.ndarray
    ends: np.ndarray

    def allowed(self, places: np.ndarray, vocab_size: int) -> paddle.Tensor:
        """Return which tokens could be drawn at ``places`` (numbers of output tokens), bool [places, vocab_size]."""
        rows = np.zeros((len(places), vocab_size), bool)
        for row, place in zip(rows, places.tolist(), strict=True):
            start, end = self.ends[place - 1] if place else 0, self.ends[place]
            row[self.ids[start:end] if end > start else slice(None)] = True
        return paddle.to_tensor(rows)


class Distribution(NamedTuple):
    """How logits become log probabilities. masks: None = every token of the vocabulary could be drawn."""

    temperature: float = 1.0
    masks: Masks | None = None

    def masked(self, logits: paddle.Tensor, places: np.ndarray, excluded: float) -> paddle.Tensor:
        """Return logits [N, V] of the output tokens ``places``, ``excluded`` for tokens that could not be drawn."""
        if self.masks is None:
            return logits
        allowed = self.masks.allowed(places, logits.shape[1])
        return paddle.where(allowed, logits, paddle.full([1], excluded, "float32"))

    def divisors(self, rows: int) -> np.ndarray | None:
        """Return the temperatures as the ops take them. None: the logits stay as they are, as in mode raw; with masks
        they never do, as in mode processed."""
        plain = self.masks is None and self.temperature in (0.0, 1.0)
        return None if plain else divisors([self.temperature] * rows)


def checked_masks(given: SamplingMasks | None, samples: Sequence[Sample], vocab_size: int) -> Masks | None:
    """Return the masks of all output tokens. Raises InvalidField, which names the sequence, unless there is one for
    each token, with the token in it."""
    if given is None:
        return None
    if len(given) != len(samples):
        raise InvalidField("sampling_masks", f"expected one per sequence ({len(samples)}), got {len(given)}")
    rows = [
        _checked(mask, token, f"sampling_masks[{i}][{k}]", vocab_size)
        for i, (sample, masks) in enumerate(zip(samples, given, strict=True))
        for k, (token, mask) in enumerate(_aligned(sample, masks, f"sampling_masks[{i}]"))
    ]
    return Masks(np.concatenate(rows), np.cumsum([len(row) for row in rows]))


def _aligned(sample: Sample, masks: Sequence[Ids], field: str) -> list[tuple[int, Ids]]:
    if len(masks) != sample.output:
        raise InvalidField(field, f"expected one per output token ({sample.output}), got {len(masks)}")
    return list(zip(sample.ids[sample.prompt :].tolist(), masks, strict=True))


def _checked(mask: Ids, token: int, field: str, vocab_size: int) -> np.ndarray:
    ids = np.asarray(mask if len(mask) else np.empty(0, np.int32))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size):
        raise InvalidField(field, f"expected token ids from 0 to {vocab_size - 1}")
    if len(ids) and token not in ids:
        raise InvalidField(field, f"expected the sampled token {token} among them")
    return ids.astype(np.int32)
