"""Engines for the behaviour check whose weights, rounding and KV a test chooses, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.interface import new_kv_cache
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.interface import AttentionBatch
from fastdeploy.model_executor.ops.vocabulary import LogprobBatch
from fastdeploy.rl.check_sync.answers import Answer, Question
from fastdeploy.rl.check_sync.own_run import OwnRun
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.rl.scoring.scorer import Packer

BLOCK = 16


class StubEngine:
    """An engine that serves ``tensors``. noise: its rounding, in multiples of that of our own run in bfloat16; 0 = it
    rounds as we do."""

    def __init__(self, trainer: TrainerWeights, tensors: Mapping[str, np.ndarray], noise: float = 2.0):
        self._rounded, self._exact = OwnRun(trainer, "bfloat16"), OwnRun(trainer, "float32")
        self._rounded.load(tensors)
        self._exact.load(tensors)
        self._noise, self._rng = noise, np.random.default_rng(0)

    def ask(self, prompts: Sequence[Sequence[int]], question: Question, batch: int = 16) -> list[Answer]:
        sequences = [list(prompt) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        for _ in range(question.max_tokens):  # greedily
            ends = [len(ids) for ids in sequences]
            tokens, _ = self._rounded.best([[*ids, 0] for ids in sequences], ends)
            for ids, token in zip(sequences, tokens, strict=True):
                ids.append(int(token))
        given = [1 if question.with_prompt else length for length in lengths]
        values = self._rounded.logprobs(sequences, given)
        if self._noise:
            exact = self._exact.logprobs(sequences, given)
            values = exact + self._noise * self._rng.permutation(values - exact)
        parts = np.split(values, np.cumsum([len(ids) - one for ids, one in zip(sequences, given, strict=True)])[:-1])
        return [
            Answer(
                tuple(ids[:length]),
                part[: length - 1] if question.with_prompt else None,
                tuple(ids[length:]),
                part[length - 1 :] if question.with_prompt else part,
                0,
            )
            for ids, length, part in zip(sequences, lengths, parts, strict=True)
        ]


def with_older_kv(
    trainer: TrainerWeights,
    new: Mapping[str, np.ndarray],
    old: Mapping[str, np.ndarray],
    answers: Sequence[Answer],
) -> list[Answer]:
    """Return the answers as an engine with the weights ``new`` gives them whose prefix cache has the keys and values
    that the weights ``old`` have made: of all whole blocks of the prompt."""
    config = load_config(trainer.model_folder)
    model = build_model(config, get_ops("bfloat16"), config.max_position_embeddings)
    packer = Packer(model)
    before, after = packer.pack(old), packer.pack(new)
    found = []
    for answer in answers:
        ids = np.array(answer.prompt + answer.token_ids, np.int32)
        cached = (len(answer.prompt) - 1) // BLOCK * BLOCK
        cache = new_kv_cache(model.ops, config, -(-len(ids) // BLOCK), BLOCK)
        table = np.arange(cache.num_blocks, dtype=np.int32)[None]

        def rows(first: int, last: int, table: np.ndarray = table) -> AttentionBatch:
            cu_tokens, starts = np.array([0, last - first], np.int32), np.array([first], np.int32)
            return AttentionBatch(cu_tokens, starts, table, np.arange(first, last, dtype=np.int32))

        model.forward(before, ids[:cached], cache, rows(0, cached), np.array([cached - 1]))
        scored = np.arange(len(answer.prompt) - 1 - cached, len(ids) - 1 - cached)
        hidden = model.forward(after, ids[cached:-1], cache, rows(cached, len(ids) - 1), scored)
        logits = model.logits(after, hidden)
        chosen = model.ops.logprobs(logits, LogprobBatch(ids[len(answer.prompt) :], 0, None)).chosen
        found.append(answer._replace(logprobs=np.asarray(chosen, np.float64), cached=cached))
    return found
