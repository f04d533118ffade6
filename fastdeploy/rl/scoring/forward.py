"""Log probabilities of output tokens by the engine's own model and ops.

The bits of a row do not depend on the other rows of a batch, nor on how a sequence was cut into chunks (interface.Ops).
So many samples are computed at once, and samples with the same prompt share the KV of its whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import paddle

from fastdeploy.core.errors import NonFiniteLogits
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops.interface import AttentionBatch, KVCache
from fastdeploy.rl.scoring.samples import Sample
from fastdeploy.worker.sampler import at_temperature

BLOCK = 16  # tokens of a KV block
LOGITS = 1 << 22  # logits that are in memory at once


class EngineForward:
    """Computes log probabilities. max_tokens: of one batch, unless a single sample is longer."""

    def __init__(self, model: Model, max_tokens: int):
        self._model, self._max_tokens = model, max_tokens
        self._cache: KVCache | None = None

    def logprobs(self, weights: ModelWeights, samples: Sequence[Sample], temperature: float) -> np.ndarray:
        """Return the log probability of each output token, float32, in the order of the samples. Raises
        NonFiniteLogits."""
        found = np.empty(sum(sample.output for sample in samples), np.float32)
        for batch in self._batches(samples):
            layout = _BatchLayout(batch)
            hidden = self._model.forward(
                weights, layout.token_ids, self._cache_for(layout.num_blocks), layout.attention, layout.scored_rows
            )
            targets = np.concatenate([sample.ids[sample.prompt :] for sample in batch])
            places = np.concatenate([np.arange(s.first, s.first + s.output) for s in batch])
            found[places] = self._scores(weights, hidden, targets, temperature)
        if np.isnan(found).any():
            of = next(i for i, s in enumerate(samples) if np.isnan(found[s.first : s.first + s.output]).any())
            raise NonFiniteLogits(f"sequences[{of}]: the weights give logits that are not finite")
        return found

    def _scores(
        self, weights: ModelWeights, hidden: paddle.Tensor, targets: np.ndarray, temperature: float
    ) -> np.ndarray:
        step = max(1, LOGITS // self._model.config.vocab_size)
        found = []
        for at in range(0, len(targets), step):
            logits = self._model.logits(weights, hidden[at : at + step])
            if temperature not in (0.0, 1.0):
                logits = at_temperature(logits, [temperature] * logits.shape[0])
            found.append(self._model.ops.logprobs(logits, targets[at : at + step], 0)[0])
        return np.concatenate(found)

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples in batches, those with the same prompt side by side."""
        groups: dict[bytes, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.ids[: sample.prompt].tobytes(), []).append(sample)
        batch: list[Sample] = []
        tokens = 0
        for sample in (sample for group in groups.values() for sample in group):
            if batch and tokens + sample.rows > self._max_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(sample)
            tokens += sample.rows
        yield batch

    def _cache_for(self, num_blocks: int) -> KVCache:
        """Return a KV cache of at least so many blocks, the same one each time if it is large enough."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # frees the old memory first
            c = self._model.config
            self._cache = self._model.ops.new_kv_cache(
                c.num_hidden_layers, num_blocks, BLOCK, c.num_key_value_heads, c.head_dim
            )
        return self._cache


class _BatchLayout:
    """The rows and blocks of one batch. A prompt of several samples is a sequence of its own, up to its last whole
    block that does not hold the last token; each sample continues it. The keys and values of a whole step are written
    before any row attends to them, so the samples need no later step.

    scored_rows: those that predict an output token, in the order of the samples."""

    def __init__(self, batch: Sequence[Sample]):
        self._ids: list[np.ndarray] = []
        self._starts: list[int] = []
        self._tables: list[list[int]] = []
        self.num_blocks = 0
        self._rows = 0
        scored = []
        shared: list[int] = []
        for i, sample in enumerate(batch):
            if i == 0 or not _same_prompt(sample, batch[i - 1]):
                alone = i + 1 == len(batch) or not _same_prompt(sample, batch[i + 1])
                common = 0 if alone else (sample.prompt - 1) // BLOCK * BLOCK
                shared = self._add(sample.ids[:common], 0, []) if common else []
            start = len(shared) * BLOCK
            scored.append(np.arange(sample.prompt - 1, sample.rows) - start + self._rows)
            self._add(sample.ids[start:-1], start, shared)
        self.scored_rows = np.concatenate(scored)
        self.token_ids = np.concatenate(self._ids)
        self.attention = self._attention()

    def _add(self, ids: np.ndarray, start: int, shared: list[int]) -> list[int]:
        """Add a sequence that continues the blocks ``shared``. Returns its own blocks."""
        own = list(range(self.num_blocks, self.num_blocks + -(-len(ids) // BLOCK)))
        self.num_blocks += len(own)
        self._rows += len(ids)
        self._ids.append(ids)
        self._starts.append(start)
        self._tables.append(shared + own)
        return own

    def _attention(self) -> AttentionBatch:
        lengths = np.array([len(ids) for ids in self._ids], np.int32)
        starts = np.array(self._starts, np.int32)
        cu_tokens = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        tables = np.zeros((len(starts), max(map(len, self._tables))), np.int32)
        for row, table in zip(tables, self._tables, strict=True):
            row[: len(table)] = table
        positions = np.arange(cu_tokens[-1], dtype=np.int32) + (starts - cu_tokens[:-1]).repeat(lengths)
        return AttentionBatch(cu_tokens, starts, tables, positions)


def _same_prompt(one: Sample, other: Sample) -> bool:
    return np.array_equal(one.ids[: one.prompt], other.ids[: other.prompt])
