"""From logits to tokens: penalties, banned ids, random numbers, the draw, and logprobs where a row asks for them."""

from __future__ import annotations

import numpy as np
import paddle

from fastdeploy.inter_communicator.messages import Logprob
from fastdeploy.model_executor.ops.interface import Ops, SampleBatch
from fastdeploy.model_executor.rng import uniform
from fastdeploy.scheduler.interface import Sampled, ScheduledChunk


def sample(ops: Ops, logits: paddle.Tensor, chunks: list[ScheduledChunk]) -> list[Sampled]:
    """Draw one token for each chunk from its row of logits [len(chunks), V], which may be overwritten. Logprobs are
    those of the raw logits."""
    asking = [i for i, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None]
    touched = [i for i, chunk in enumerate(chunks) if chunk.banned or chunk.sampling.has_penalties]
    raw = logits.clone() if asking and touched else logits
    apply_penalties_and_bans(logits, chunks, touched)
    token_ids = ops.sample(logits, _sample_batch(chunks))
    sampled = [Sampled(token, None) for token in token_ids.tolist()]
    if asking:
        for i, logprob in zip(asking, _logprobs(ops, raw, token_ids, chunks, asking), strict=True):
            sampled[i] = sampled[i]._replace(logprob=logprob)
    return sampled


def apply_penalties_and_bans(logits: paddle.Tensor, chunks: list[ScheduledChunk], touched: list[int]) -> None:
    """In place, on the entries of the ``touched`` rows that a penalty or a ban is about, and on no others."""
    penalised = [i for i in touched if chunks[i].sampling.has_penalties]
    if penalised:
        ids, values = _penalised_entries(logits, chunks, penalised)
        _put(logits, penalised, ids, np.concatenate(values))
    banned = [i for i in touched if chunks[i].banned]
    if banned:
        ids = [np.array([t for t in chunks[i].banned if t < logits.shape[1]], np.int64) for i in banned]
        _put(logits, banned, ids, np.full(sum(map(len, ids)), -np.inf))


def _penalised_entries(
    logits: paddle.Tensor, chunks: list[ScheduledChunk], rows: list[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each row: the ids it has seen and their new logits. Repetition (CTRL, Keskar et al. 2019: divide a positive
    logit, multiply a negative one) counts prompt and output; presence and frequency (OpenAI) count the output."""
    ids, counts = [], []
    for i in rows:
        known = np.fromiter(chunks[i].all_token_ids, np.int64, len(chunks[i].all_token_ids))
        seen, where = np.unique(known, return_inverse=True)
        ids.append(seen)
        counts.append(np.bincount(where[chunks[i].num_prompt_tokens :], minlength=len(seen)))
    old = paddle.gather_nd(logits, paddle.to_tensor(_indices(rows, ids))).numpy()
    values = np.split(old, np.cumsum([len(seen) for seen in ids])[:-1])
    for k, i in enumerate(rows):
        params, row = chunks[i].sampling, values[k]
        repeated = np.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        values[k] = repeated - params.presence_penalty * (counts[k] > 0) - params.frequency_penalty * counts[k]
    return ids, values


def _indices(rows: list[int], ids: list[np.ndarray]) -> np.ndarray:
    """(row, id) pairs, int64 [N, 2]."""
    return np.stack([np.repeat(rows, [len(i) for i in ids]), np.concatenate(ids)], axis=1)


def _put(logits: paddle.Tensor, rows: list[int], ids: list[np.ndarray], values: np.ndarray) -> None:
    row, column = paddle.to_tensor(_indices(rows, ids).T.copy())
    paddle.index_put_(logits, (row, column), paddle.to_tensor(values.astype(np.float32)))


def _sample_batch(chunks: list[ScheduledChunk]) -> SampleBatch:
    params = [chunk.sampling for chunk in chunks]
    temperature = np.array([p.temperature for p in params], np.float64)
    if temperature.any():
        random = uniform(
            np.array([p.seed for p in params], np.int64),
            np.array([chunk.key[1] for chunk in chunks], np.int64),
            np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int64),
        )
    else:
        random = np.zeros(len(chunks))
    return SampleBatch(
        temperature=temperature,
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
        uniform=random,
    )


def _logprobs(
    ops: Ops, logits: paddle.Tensor, token_ids: np.ndarray, chunks: list[ScheduledChunk], asking: list[int]
) -> list[Logprob]:
    if len(asking) < len(chunks):
        logits, token_ids = paddle.index_select(logits, paddle.to_tensor(asking)), token_ids[asking]
    wanted = [chunks[i].sampling.logprobs or 0 for i in asking]
    chosen, best, ids = ops.logprobs(logits, token_ids, min(max(wanted), logits.shape[1]))
    rows = zip(chosen.tolist(), ids.tolist(), best.tolist(), wanted, strict=True)
    return [Logprob(value, tuple(zip(i[:k], v[:k], strict=True))) for value, i, v, k in rows]
