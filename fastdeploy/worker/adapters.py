"""The adapters of one runner: their staging, and which of them the rows of a step use."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

import numpy as np
import paddle

from fastdeploy.core.errors import OutOfSpace
from fastdeploy.core.plan import ScheduledChunk
from fastdeploy.core.runner import AdapterInfo
from fastdeploy.model_executor.lora import read_adapter
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import AdapterRows, PackedAdapter


class AdapterStaging:
    """Implements ``AdapterStaging`` (core/runner.py). max_rank: the largest rank that is accepted."""

    def __init__(self, model: Model, max_rank: int):
        self._model, self._max_rank = model, max_rank
        self._packed: PackedAdapter | None = None

    def read(self, path: str) -> AdapterInfo:
        """See ``AdapterStaging.read``."""
        try:
            with paddle.no_grad():
                self._packed, rank, fingerprint = read_adapter(path, self._model, self._max_rank)
        except MemoryError as error:
            raise OutOfSpace(f"no memory for the adapter: {error}") from error
        return AdapterInfo(rank, self._packed.nbytes, fingerprint)

    def finish(self) -> PackedAdapter:
        """See ``AdapterStaging.finish``. Returns the argument of ``ModelRunner.commit_adapter``."""
        assert self._packed is not None, "nothing was read"
        return self._packed


class Adapters:
    """The packed adapters of a runner, by number."""

    def __init__(self) -> None:
        self._packed: dict[int, PackedAdapter] = {}

    def add(self, number: int, packed: PackedAdapter) -> None:
        assert number > 0 and number not in self._packed, "an adapter's number is used twice"
        self._packed[number] = packed

    def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._packed.pop(number, None)

    def rows_of(self, chunks: list[ScheduledChunk], cu_tokens: np.ndarray) -> AdapterRows | None:
        """Return the adapter of each token row; None if no chunk has an adapter. The chunks of one adapter must be
        adjacent. cu_tokens: see ``AttentionBatch``."""
        numbers = [chunk.served.adapter for chunk in chunks]
        if not any(numbers):
            return None
        used = [number for number, _ in groupby(numbers)]
        assert len(set(used)) == len(used), "the chunks of an adapter are not adjacent"
        index = {number: i for i, number in enumerate(filter(None, used))} | {0: -1}
        of_chunks = np.array([index[number] for number in numbers], np.int32)
        rows = of_chunks.repeat(np.diff(cu_tokens))
        return AdapterRows([self._packed[number] for number in used if number], rows)


def picked(adapters: AdapterRows | None, rows: np.ndarray | slice) -> AdapterRows | None:
    """Return the adapters of some of the rows, for the logits; None if none of the adapters has a part there."""
    if adapters is None or all(adapter.lm_head is None for adapter in adapters.adapters):
        return None
    return AdapterRows(adapters.adapters, adapters.rows[rows])
