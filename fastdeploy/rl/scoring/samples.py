"""The input of a scorer: samples of a prompt and its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from fastdeploy.core.errors import InvalidField

Ids: TypeAlias = "Sequence[int] | np.ndarray"


class Sample(NamedTuple):
    """A prompt and the tokens that follow it. ids: both, int32. prompt: length of the prompt. first: number of output
    tokens of the samples before this one, so ``first`` is the index of the first output token in the result."""

    ids: np.ndarray
    prompt: int
    first: int

    @property
    def output(self) -> int:
        """Number of output tokens."""
        return len(self.ids) - self.prompt

    @property
    def rows(self) -> int:
        """Number of tokens that the model computes: all but the last, whose logits nobody needs."""
        return len(self.ids) - 1


def checked_samples(sequences: Iterable[tuple[Ids, Ids]], vocab_size: int, max_len: int) -> list[Sample]:
    """Return the samples of (prompt_ids, output_ids) pairs. Raises InvalidField, which names the sequence, for an empty
    list, an id that is not in the vocabulary, and more than ``max_len`` tokens."""
    samples: list[Sample] = []
    first = 0
    for i, pair in enumerate(sequences):
        field = f"sequences[{i}]"
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidField(field, "expected a pair of prompt_ids and output_ids")
        prompt, output = (
            _checked_ids(ids, f"{field}.{name}", vocab_size)
            for ids, name in zip(pair, ("prompt_ids", "output_ids"), strict=True)
        )
        if len(prompt) + len(output) > max_len:
            raise InvalidField(field, f"expected at most {max_len} tokens, got {len(prompt) + len(output)}")
        samples.append(Sample(np.concatenate([prompt, output]), len(prompt), first))
        first += len(output)
    if not samples:
        raise InvalidField("sequences", "expected at least one sequence")
    return samples


def _checked_ids(ids: Ids, field: str, vocab_size: int) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        array = np.zeros(0)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise InvalidField(field, "expected token ids, at least one")
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise InvalidField(field, f"expected token ids from 0 to {vocab_size - 1}, got {wrong}")
    return array.astype(np.int32)
