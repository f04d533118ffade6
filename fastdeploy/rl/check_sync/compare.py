"""The tensors that differ, by how much, and the table of ways in which tensors differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fastdeploy.core.serving_dtype import ITEMSIZE, dtype_of
from fastdeploy.rl.check_sync import changes, origins, places
from fastdeploy.rl.check_sync.case import Case, Sides, bits_of
from fastdeploy.rl.check_sync.report import Difference

BATCH_BYTES = 256 << 20  # of tensors that are asked for at once
MAX_BYTES = 8 << 30  # of tensors whose values are compared; the others are named by their digests

Values = Callable[[Sequence[str]], Iterator[tuple[str, np.ndarray]]]


class Classifier(NamedTuple):
    """One way in which a tensor differs. kind: its name. by_digest needs no values, so it is asked first."""

    kind: str
    by_digest: Callable[[str, Sides], str | None] | None = None
    by_values: Callable[[Case], str | None] | None = None

    def find(self, name: str, sides: Sides, case: Case | None) -> str | None:
        """Return one sentence about a tensor that differs in this way. case: None if its values are not known."""
        found = None if self.by_digest is None else self.by_digest(name, sides)
        if found is None and self.by_values is not None and case is not None:
            return self.by_values(case)
        return found


# The first that finds something names the difference. So those that are sure come first, and guesses last.
CLASSIFIERS = (
    Classifier("tied head", by_digest=origins.tied_head),
    Classifier("stale", by_digest=origins.stale),
    Classifier("never updated", by_digest=origins.never_updated),
    Classifier("zero", origins.zero, changes.zero),
    Classifier("another expert", by_digest=origins.exchanged_experts),
    Classifier("gate and up", by_digest=origins.exchanged_gate_and_up),
    Classifier("q, k, v", by_digest=origins.exchanged_qkv),
    Classifier("another layer", by_digest=origins.another_layer),
    Classifier("another tensor", by_digest=origins.another_tensor),
    Classifier("stale and another tensor", by_digest=origins.stale_and_another),
    Classifier("not finite", by_values=changes.not_finite),
    Classifier("constant", by_values=changes.constant),
    Classifier("repeated", by_digest=origins.repeated),
    Classifier("byte order", by_values=changes.byte_order),
    Classifier("transposed", by_values=places.transposed),
    Classifier("flipped bit", by_values=changes.flipped_bits),
    Classifier("wrong dtype", by_values=changes.wrong_dtype),
    Classifier("scaled", by_values=changes.scaled),
    Classifier("shifted", by_values=changes.shifted),
    Classifier("scaled", by_values=changes.scaled_and_rounded),
    Classifier("rows", by_values=places.rows),
    Classifier("columns", by_values=places.columns),
    Classifier("fused", by_values=places.mixed_parts),
    Classifier("moved", by_values=places.moved_run),
    Classifier("part of the rows", by_values=places.part_of_rows),
    Classifier("part of the columns", by_values=places.part_of_columns),
    Classifier("update in part", by_values=changes.between_updates),
    Classifier("scaled rows", by_values=changes.scaled_rows),
    Classifier("adapter", by_values=changes.low_rank),
    Classifier("few values", by_values=places.part_of_values),
    Classifier("near", by_values=changes.near),
    Classifier("unrelated", by_values=changes.unrelated),
)
SHAPE, UNKNOWN = "shape", "unknown"


def differences(
    names: Iterable[str], sides: Sides, shapes: Mapping[str, tuple[int, ...]], values: Values | None
) -> Iterator[Difference]:
    """Yield the differences of the tensors ``names``, which differ, in this order. values: returns name and values of
    tensors that serve, in the serving dtype; None if the engine does not show them."""
    left = MAX_BYTES if values is not None else 0
    for batch in _batches(names, sides, shapes):
        size = sum(nbytes for _, nbytes in batch)
        chosen = [name for name, _ in batch]
        found = dict.fromkeys(chosen, None) if size > left or values is None else dict(values(chosen))
        left -= size
        for name in chosen:
            served = found.get(name)
            yield _difference(name, sides, shapes[name], served)


def _difference(name: str, sides: Sides, shape: tuple[int, ...], served: np.ndarray | None) -> Difference:
    """Return how one tensor differs. served: its values; None if they are not known."""
    case = None
    size = int(np.prod(shape, dtype=np.int64))
    if served is not None and served.shape != tuple(shape):
        return Difference(name, SHAPE, f"the engine has the shape {list(served.shape)}", shape, size)
    if served is not None:
        expected, served = (bits_of(np.ascontiguousarray(one)).reshape(shape) for one in (sides.read(name), served))
        case = Case(name, sides, expected, served)
    kind, how = UNKNOWN, "the values are others, in no way that this check knows"
    for one in CLASSIFIERS:
        if (sentence := one.find(name, sides, case)) is not None:
            kind, how = one.kind, sentence
            break
    found = Difference(name, kind, how, shape, size)
    return found if case is None else _with_sizes(found, case)


def _with_sizes(found: Difference, case: Case) -> Difference:
    """Return ``found`` with the fields that say by how much the tensor differs."""
    expected, served = case.expected.reshape(-1), case.served.reshape(-1)
    far = np.abs(case.difference.reshape(-1))
    max_abs = float(far.max(initial=0.0, where=~np.isnan(far)))
    largest = float(np.abs(expected).max(initial=0.0))
    first = int(case.changed[0]) if case.changed.size else 0
    return replace(
        found,
        changed=int(case.changed.size),
        max_abs=max_abs,
        relative=max_abs / largest if largest else math.inf,
        first=first,
        expected=float(expected[first]),
        served=float(served[first]),
    )


def _batches(
    names: Iterable[str], sides: Sides, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[list[tuple[str, int]]]:
    """Yield the names in batches of at most BATCH_BYTES, each with its bytes."""
    batch: list[tuple[str, int]] = []
    size = 0
    for name in names:
        nbytes = int(np.prod(shapes[name], dtype=np.int64)) * ITEMSIZE[dtype_of(name, sides.dtype)]
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, nbytes))
        size += nbytes
    if batch:
        yield batch
