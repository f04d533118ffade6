"""The sequences of the batch, kept at the runner, and the adapters of their rows. The plan tells of a sequence once,
and then only what is new."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fastdeploy.core.plan import NewSequence, ScheduledChunk
from fastdeploy.model_executor.ops.interface import AdapterRows, AttentionBatch, PackedAdapter


class Draws(NamedTuple):
    """The rows of logits that a token is drawn from in this step, in the order of the batch, and the sequence of each.

    positions int64 [R]: of the tokens to be drawn. The tokens before them are tokens[numbers[r], :positions[r]].
    counts int64: the rows of each sequence, one and its drafts; None = one row each. The draft that a row verifies is
    tokens[numbers[r], positions[r]]; the last row of a sequence verifies none.
    """

    sequences: list[NewSequence]
    positions: np.ndarray
    tokens: np.ndarray
    numbers: np.ndarray
    counts: np.ndarray | None = None

    def reached(self, token_ids: np.ndarray) -> np.ndarray:
        """Return whether all drafts before a row are right, bool [R]. token_ids [R]: the tokens drawn from the rows."""
        reached = np.ones(len(token_ids), bool)
        if self.counts is None:
            return reached
        at = np.minimum(self.positions, self.tokens.shape[1] - 1)  # the last row of a sequence may be at the end
        wrong = (self.tokens[self.numbers, at] != token_ids).nonzero()[0]
        ends = self.counts.cumsum()
        for row, end in zip(wrong.tolist(), ends[ends.searchsorted(wrong, "right")].tolist(), strict=True):
            reached[row + 1 : end] = False
        return reached


class Batch(NamedTuple):
    """The tokens of one step: ids int32 [T], attention's view of them, and the number of each sequence [R]."""

    token_ids: np.ndarray
    attention: AttentionBatch
    numbers: np.ndarray


class Sequences:
    """Token ids and block tables, int32, one row for each sequence number. The arrays grow with the largest number and
    with the longest sequence. The row of a sequence that has left stays until its number gets a new sequence."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._known: list[NewSequence | None] = []
        self._num_blocks = np.zeros(0, np.int64)
        self._blocks = np.zeros((0, 1), np.int32)
        self.tokens = np.zeros((0, block_size), np.int32)

    def batch(self, chunks: list[ScheduledChunk]) -> Batch:
        """Store what ``chunks`` tell of their sequences, and return the batch of the step."""
        for chunk in chunks:
            if chunk.new is not None or chunk.blocks:
                self._store(chunk)
            elif chunk.token_ids:
                end = chunk.start + chunk.count
                self.tokens[chunk.sequence, end - len(chunk.token_ids) : end] = chunk.token_ids
        numbers = np.array([chunk.sequence for chunk in chunks])
        lengths = np.array([chunk.count for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        needed = -(-(starts + lengths) // self._block_size)
        # A short table would be read beyond its end: the tokens would overwrite the keys of another sequence.
        assert (self._num_blocks[numbers] >= needed).all(), "a block table is too short for its tokens"
        cu_tokens = np.zeros(len(chunks) + 1, np.int32)
        lengths.cumsum(out=cu_tokens[1:])
        tables = self._blocks[:, : needed.max()].take(numbers, axis=0)
        positions, rows = starts, numbers
        if cu_tokens[-1] != len(chunks):  # not every chunk has one token
            positions = np.arange(cu_tokens[-1], dtype=np.int32) + (starts - cu_tokens[:-1]).repeat(lengths)
            rows = numbers.repeat(lengths)
        return Batch(self.tokens[rows, positions], AttentionBatch(cu_tokens, starts, tables, positions), numbers)

    def draws(self, numbers: np.ndarray, positions: np.ndarray, counts: np.ndarray | None) -> Draws:
        """Return the sampler's input for rows of these sequences. positions, counts: see ``Draws``."""
        return Draws([self._known[number] for number in numbers.tolist()], positions, self.tokens, numbers, counts)

    def known(self, number: int) -> NewSequence:
        """Return the settings of the sequence ``number``."""
        known = self._known[number]
        assert known is not None, "an unknown sequence"
        return known

    def _store(self, chunk: ScheduledChunk) -> None:
        number = chunk.sequence
        if number >= len(self._known):
            self._known += [None] * (number + 1 - len(self._known))
            self._num_blocks = _grown(self._num_blocks, (number + 1,))
        if chunk.new is not None:
            self._known[number] = chunk.new
            self._num_blocks[number] = 0
        assert self._known[number] is not None, "a chunk of an unknown sequence"
        at = int(self._num_blocks[number])
        end = at + len(chunk.blocks)
        self._num_blocks[number] = end
        width = max(end, -(-len(chunk.token_ids) // self._block_size))
        if number >= len(self._blocks) or width > self._blocks.shape[1]:
            self._blocks = _grown(self._blocks, (number + 1, width))
            self.tokens = _grown(self.tokens, (number + 1, width * self._block_size))
        self._blocks[number, at:end] = chunk.blocks
        first = 0 if chunk.new is not None else chunk.start + chunk.count - len(chunk.token_ids)
        self.tokens[number, first : first + len(chunk.token_ids)] = chunk.token_ids


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a copy with at least ``shape``. Each side that is too short at least doubles."""
    sides = [have if have >= want else max(want, 2 * have) for have, want in zip(array.shape, shape, strict=True)]
    grown = np.zeros(sides, array.dtype)
    grown[tuple(slice(have) for have in array.shape)] = array
    return grown


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
