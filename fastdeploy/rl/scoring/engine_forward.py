"""The forward pass of a scorer: log probabilities by the engine's own model and ops.

The bits of a row do not depend on the other rows of a batch, nor on how a sequence was cut into chunks
(interface.Ops). So many samples are computed at once, and samples with the same prompt share the KV of its whole
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import paddle

from fastdeploy.core.errors import NonFiniteLogits
from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.model_executor.models.interface import Model, ModelWeights, new_kv_cache
from fastdeploy.model_executor.ops.interface import AttentionBatch, KVCache, Routing
from fastdeploy.model_executor.ops.vocabulary import LogprobBatch
from fastdeploy.rl.scoring.distribution import Distribution
from fastdeploy.rl.scoring.samples import Sample

BLOCK = 16  # tokens of a KV block
LOGITS = 1 << 22  # logits that are in memory at once


class EngineForward:
    """The computation of log probabilities. max_tokens: of one batch, unless a single sample is longer. experts: of the
    model, None for a dense one."""

    def __init__(self, model: Model, max_tokens: int, experts: ExpertsInfo | None):
        self._model, self._max_tokens, self._experts = model, max_tokens, experts
        self._cache: KVCache | None = None

    def logprobs(
        self, weights: ModelWeights, samples: Sequence[Sample], over: Distribution, record: bool
    ) -> tuple[np.ndarray, Sequence[Sample]]:
        """Return the log probability of each output token, float32, in the order of the samples; and the samples. With
        ``record`` those of a model with experts have the routing that they were computed with. Raises
        NonFiniteLogits."""
        recorded: dict[int, np.ndarray] | None = {} if record and self._experts is not None else None
        found = self._found(weights, samples, over, 0, recorded)[0]
        if recorded is not None:
            samples = [sample._replace(routing=recorded[sample.first]) for sample in samples]
        return found, samples

    def top_logprobs(
        self, weights: ModelWeights, samples: Sequence[Sample], over: Distribution, top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the log probabilities of the ``top`` best tokens at each output token, best first: int32
        and float32 [output tokens, top]. Raises NonFiniteLogits."""
        _, ids, values = self._found(weights, samples, over, top)
        return ids, values

    def _found(
        self,
        weights: ModelWeights,
        samples: Sequence[Sample],
        over: Distribution,
        top: int,
        recorded: dict[int, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = sum(sample.output for sample in samples)
        chosen = np.empty(count, np.float32)
        ids, values = np.empty((count, top), np.int32), np.empty((count, top), np.float32)
        for logits, targets, places in self._rows(weights, samples, recorded):
            batch = LogprobBatch(targets, top, over.divisors(len(places)))
            found = self._model.ops.logprobs(over.masked(logits, places, -math.inf), batch)
            chosen[places], ids[places], values[places] = found.chosen, found.top_ids, found.top_values
        if np.isnan(chosen).any():
            of = next(i for i, s in enumerate(samples) if np.isnan(chosen[s.first : s.first + s.output]).any())
            raise NonFiniteLogits(f"sequences[{of}]: the weights give logits that are not finite")
        return chosen, ids, values

    def _rows(
        self, weights: ModelWeights, samples: Sequence[Sample], recorded: dict[int, np.ndarray] | None
    ) -> Iterator[tuple[paddle.Tensor, np.ndarray, np.ndarray]]:
        """Yield logits [N, V] with the output tokens that they predict, and the numbers of these: in slices, since
        those of a large vocabulary take more memory than the rest. recorded: takes the routing of each sample, by
        ``first`` of the sample."""
        step = max(1, LOGITS // self._model.config.vocab_size)
        for batch in self._batches(samples):
            layout = _BatchLayout(batch)
            cache, routing = self._cache_for(layout.num_blocks), self._routing(layout, batch, recorded is not None)
            hidden = self._model.forward(
                weights, layout.token_ids, cache, layout.attention, layout.scored_rows, routing=routing
            )
            if recorded is not None and routing is not None:
                for sample, rows in zip(batch, layout.rows_of, strict=True):
                    recorded[sample.first] = routing.experts[rows]
            targets = np.concatenate([sample.ids[sample.prompt :] for sample in batch])
            places = np.concatenate([np.arange(s.first, s.first + s.output) for s in batch])
            for at in range(0, len(targets), step):
                here = slice(at, at + step)
                yield self._model.logits(weights, hidden[here]), targets[here], places[here]

    def _routing(self, layout: _BatchLayout, batch: Sequence[Sample], record: bool) -> Routing | None:
        """Return the routing of the rows of a batch: to read, if its samples have one, or to write; or None."""
        forced = batch[0].routing is not None
        if self._experts is None or not (forced or record):
            return None
        shape = len(layout.token_ids), len(self._experts.layers), self._experts.top_k
        experts = np.zeros(shape, np.uint16)
        for sample, rows in zip(batch, layout.rows_of, strict=True):
            if sample.routing is not None:
                experts[rows] = sample.routing
        return Routing(experts, forced)

    def _batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples in batches, those with the same prompt side by side. Either all samples of a batch have a
        routing, or none has."""
        groups: dict[tuple[bytes, bytes], list[Sample]] = {}
        for sample in sorted(samples, key=lambda sample: sample.routing is not None):
            groups.setdefault(_prompt_of(sample), []).append(sample)
        batch: list[Sample] = []
        tokens = 0
        for sample in (sample for group in groups.values() for sample in group):
            mixed = batch and (batch[0].routing is None) != (sample.routing is None)
            if mixed or (batch and tokens + sample.rows > self._max_tokens):
                yield batch
                batch, tokens = [], 0
            batch.append(sample)
            tokens += sample.rows
        yield batch

    def _cache_for(self, num_blocks: int) -> KVCache:
        """Return a KV cache of at least so many blocks, the same one each time if it is large enough."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # frees the old memory first
            self._cache = new_kv_cache(self._model.ops, self._model.config, num_blocks, BLOCK)
        return self._cache


class _BatchLayout:
    """The rows and blocks of one batch. A prompt of several samples is a sequence of its own, up to its last whole
    block that does not hold the last token; each sample continues it. The keys and values of a whole step are written
    before any row attends to them, so the samples need no later step.

    rows_of: of each sample, the rows of its tokens. scored_rows: those that predict an output token, in the order of
    the samples."""

    def __init__(self, batch: Sequence[Sample]):
        self._ids: list[np.ndarray] = []
        self._starts: list[int] = []
        self._tables: list[list[int]] = []
        self.num_blocks = 0
        self._rows = 0
        self.rows_of: list[np.ndarray] = []
        prompts = [_prompt_of(sample) for sample in batch]
        shared: list[int] = []
        first = np.arange(0)  # the rows of the shared blocks
        for i, sample in enumerate(batch):
            if i == 0 or prompts[i] != prompts[i - 1]:
                alone = i + 1 == len(batch) or prompts[i] != prompts[i + 1]
                common = 0 if alone else (sample.prompt - 1) // BLOCK * BLOCK
                first = np.arange(self._rows, self._rows + common)
                shared = self._add(sample.ids[:common], 0, []) if common else []
            own = sample.ids[len(first) : -1]
            self.rows_of.append(np.concatenate([first, np.arange(self._rows, self._rows + len(own))]))
            self._add(own, len(first), shared)
        scored = [rows[sample.prompt - 1 :] for sample, rows in zip(batch, self.rows_of, strict=True)]
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


def _prompt_of(sample: Sample) -> tuple[bytes, bytes]:
    """Return what samples that share KV have in common: the ids of the prompt and, if it is forced, their routing."""
    routing = b"" if sample.routing is None else sample.routing[: sample.prompt].tobytes()
    return sample.ids[: sample.prompt].tobytes(), routing
