"""The routing of the tokens whose KV is in the cache: which experts computed each of them, see core/experts.py.

A token's row lies in the slot of its KV. It is written by the step that writes the KV, and copied with it. So wherever
the KV of a token can be used, by any sequence and for as long as it stays, its row is there, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.core.plan import BlockCopy, NoneAllowed, NonFinite, Sampled, ScheduledChunk
from fastdeploy.model_executor.ops.interface import AttentionBatch, Routing


class RoutingStore:
    """The rows of all slots of a KV cache, [blocks, block_size, ids of a row], in the type of ``ExpertsInfo.dtype``."""

    def __init__(self, info: ExpertsInfo, num_blocks: int, block_size: int):
        self._info = info
        self._block_size = block_size
        self._blocks = np.zeros((num_blocks, block_size, info.row_ids), info.dtype)
        self._slots = self._blocks.reshape(num_blocks * block_size, info.row_ids)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the rows of whole blocks, in order: the target of one copy may be the source of a later one."""
        for source, target in copies:
            self._blocks[target] = self._blocks[source]

    def routing(self, num_tokens: int) -> Routing:
        """Return the place into which a step of so many tokens writes their experts."""
        return Routing(np.empty((num_tokens, len(self._info.layers), self._info.top_k), np.uint16))

    def write(self, batch: AttentionBatch, routing: Routing) -> None:
        """Keep the experts of all tokens of a step."""
        chunks = np.arange(len(batch.starts)).repeat(np.diff(batch.cu_tokens))
        self._slots[self._slots_of(batch, chunks, batch.positions)] = routing.experts.reshape(-1, self._info.row_ids)

    def read(
        self,
        chunks: Sequence[ScheduledChunk],
        batch: AttentionBatch,
        sampled: Sequence[Sampled | NonFinite | NoneAllowed | None],
    ) -> dict[int, bytes]:
        """Return the rows for ``StepResult.routed``. sampled: the draw of each chunk."""
        asking, firsts, counts = [], [], []
        for i, (chunk, drawn) in enumerate(zip(chunks, sampled, strict=True)):
            if chunk.routed_from >= 0 and isinstance(drawn, Sampled):
                asking.append(i)
                firsts.append(chunk.routed_from)
                accepted = len(drawn.token_ids) - 1
                counts.append(max(chunk.start + chunk.num_known + accepted - chunk.routed_from, 0))
        if not asking:
            return {}
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + (np.array(firsts) - ends + counts).repeat(counts)
        data = self._slots[self._slots_of(batch, np.array(asking).repeat(counts), positions)].tobytes()
        edges = [0, *(ends * self._info.row_bytes).tolist()]
        return {i: data[edges[at] : edges[at + 1]] for at, i in enumerate(asking)}

    def _slots_of(self, batch: AttentionBatch, chunks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of tokens. chunks: the index of each token's chunk in the batch."""
        size = self._block_size
        return batch.block_tables[chunks, positions // size] * size + positions % size
