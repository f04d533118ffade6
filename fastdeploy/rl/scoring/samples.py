"""The input of a scorer: samples of a prompt and its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import ExpertsInfo

Ids: TypeAlias = "Sequence[int] | np.ndarray"
RoutedRows: TypeAlias = "Sequence[Sequence[Sequence[int]]] | np.ndarray | None"


class Sample(NamedTuple):
    """A prompt and the tokens that follow it. ids: both, int32. prompt: length of the prompt. first: number of output
    tokens of the samples before this one, so ``first`` is the index of the first output token in the result. routing:
    the experts that compute each row, uint16 [rows, experts layers, top_k], best first; None = those that the model
    chooses."""

    ids: np.ndarray
    prompt: int
    first: int
    routing: np.ndarray | None = None

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


def with_routing(
    samples: Sequence[Sample], routed_experts: Iterable[RoutedRows], info: ExpertsInfo | None
) -> list[Sample]:
    """Return the samples with the routing that is given for each of them. info: of the model, None for a dense one.
    Raises InvalidField, which names the entry, for one of another shape, and for ids that no router can choose."""
    if info is None:
        raise InvalidField("routed_experts", "the model has no experts")
    given = list(routed_experts)
    if len(given) != len(samples):
        raise InvalidField(
            "routed_experts", f"expected an entry for each of {len(samples)} sequences, got {len(given)}"
        )
    return [
        sample
        if rows is None
        else sample._replace(routing=_checked_routing(rows, f"routed_experts[{i}]", sample, info))
        for i, (sample, rows) in enumerate(zip(samples, given, strict=True))
    ]


def _checked_routing(rows: RoutedRows, field: str, sample: Sample, info: ExpertsInfo) -> np.ndarray:
    wanted = sample.rows, len(info.layers), info.top_k
    try:
        array = np.asarray(rows)
    except ValueError:  # lists of different lengths
        array = np.zeros(0)
    if array.dtype.kind not in "iu" or array.shape != wanted:
        of = "tokens - 1, experts layers, experts per token"
        raise InvalidField(field, f"expected integers of shape {wanted} ({of}), got {array.dtype} of {array.shape}")
    if array.min() < 0 or array.max() >= info.num_experts:
        wrong = array[(array < 0) | (array >= info.num_experts)][0]
        raise InvalidField(field, f"expected experts from 0 to {info.num_experts - 1}, got {wrong}")
    if (np.diff(np.sort(array)) == 0).any():
        raise InvalidField(field, f"expected {info.top_k} different experts for each token and layer")
    return array.astype(np.uint16)


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
