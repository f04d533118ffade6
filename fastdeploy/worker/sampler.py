"""From logits to tokens: biases, penalties, banned ids, masks, random numbers, the draw, and logprobs where a row asks
for them.

Logprobs are of one of three distributions, per row:
    raw          log softmax(logits)
    temperature  log softmax(logits / temperature); greedy: raw
    processed    the distribution that the token is drawn from: after biases, penalties, bans and masks, temperature,
                 top_k, top_p and min_p, renormalised; greedy: log softmax of the logits after biases, penalties, bans
                 and masks, as in vLLM
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import NewSequence, NonFinite, Sampled
from fastdeploy.core.sampling_params import LOGPROBS_MODES, SamplingParams
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenMasks
from fastdeploy.worker.sequences import Draws
from fastdeploy.worker.token_logprobs import divisors, token_logprobs, wanted_of

RAW, TEMPERATURE, PROCESSED = LOGPROBS_MODES
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64


class _Rows:
    """The settings of the rows of a step. They do not change while the same sequences draw."""

    def __init__(self, sequences: list[NewSequence]):
        self.sequences = sequences
        params = [sequence.sampling for sequence in sequences]
        self.by_mode = _rows_by_mode(params)
        self.greedy_masked = [i for i, p in enumerate(params) if p.return_sampling_mask and not p.temperature]
        self.penalised = {i for i, p in enumerate(params) if p.has_penalties}
        self.biased = [i for i, p in enumerate(params) if p.logit_bias]
        self.banned_before = np.array([sequence.banned_before for sequence in sequences], np.int64)
        self.has_bans = bool(self.banned_before.any())
        self.temperature = np.array([p.temperature for p in params], np.float64)
        self.top_k = np.array([p.top_k for p in params], np.int32)
        self.top_p = np.array([p.top_p for p in params], np.float64)
        self.min_p = np.array([p.min_p for p in params], np.float64)
        assert all(p.seed is not None for p in params if p.temperature), "a request without a seed was let in"
        self.seeds = np.array([p.seed or 0 for p in params], np.int64)  # a greedy row needs none
        self.choices = np.array([sequence.key[1] for sequence in sequences], np.int64)

    def sample_batch(self, positions: np.ndarray) -> SampleBatch:
        """Return the parameters of the draw. positions int64 [R]: of the tokens to be drawn."""
        greedy = not self.temperature.any()
        random = np.zeros(len(positions)) if greedy else uniform(self.seeds, self.choices, positions)
        return SampleBatch(self.temperature, self.top_k, self.top_p, self.min_p, random)


class Draw(NamedTuple):
    """Rows of logits [R, V], the tokens [R] that were drawn, and what the draws were cut off to, if it is known."""

    logits: paddle.Tensor
    token_ids: np.ndarray
    cutoff: Cutoff | None

    def picked(self, rows: list[int]) -> Draw:
        """Return these rows alone."""
        logits = paddle.index_select(self.logits, paddle.to_tensor(rows))
        return Draw(logits, self.token_ids[rows], self.cutoff.picked(rows) if self.cutoff is not None else None)


class Sampler:
    """The sampler, which draws the tokens of each step."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._rows = _Rows([])

    def sample(self, logits: paddle.Tensor, draws: Draws, masks: TokenMasks | None = None) -> list[Sampled | NonFinite]:
        """Draw one token from each row of logits [R, V], which may be overwritten. masks: the ids that may be drawn;
        the others count as ids with the logit -inf. Returns the tokens of each sequence: those of its rows up to the
        first whose draft is wrong. Logprobs are in the mode that the sequence asks for. The result is NonFinite if no
        token can be drawn from the first row of a sequence, or if the logprob there is not a number. Such a later row
        counts as one behind a wrong draft."""
        rows, positions = self._rows_of(draws.sequences), draws.positions
        banned = np.flatnonzero(positions < rows.banned_before).tolist() if rows.has_bans else []
        if masks is not None:
            banned = [row for row in banned if row not in masks.rows]  # their masks have the bans
        masked = masks is not None and PROCESSED in rows.by_mode
        touched = masked or rows.biased or rows.penalised or banned
        raw = logits.clone() if touched and rows.by_mode.keys() - {PROCESSED} else logits
        _apply_biases(logits, draws, rows.biased)
        apply_penalties_and_bans(logits, draws, sorted(rows.penalised), banned)
        cutoff = Cutoff.empty(len(positions)) if PROCESSED in rows.by_mode else None
        token_ids = self._ops.sample(logits, rows.sample_batch(positions), cutoff, masks)
        for i in rows.greedy_masked:  # nothing but the best token can be drawn
            if cutoff is not None and token_ids[i] >= 0:
                cutoff.logits[i], cutoff.ids[i] = logits[i, int(token_ids[i])].item(), token_ids[i]
        if masks is not None and masked:
            masks.apply(_in_place(logits))
        sampled: list[Sampled | NonFinite] = [
            Sampled([token]) if token >= 0 else NonFinite(position)
            for token, position in zip(token_ids.tolist(), positions.tolist(), strict=True)
        ]
        reached = draws.reached(token_ids)
        for mode, asking in rows.by_mode.items():
            drawn = [i for i in asking if token_ids[i] >= 0 and reached[i]]
            draw = Draw(logits if mode == PROCESSED else raw, token_ids, cutoff)
            logprobs = _logprobs(self._ops, mode, draw, draws.sequences, drawn) if drawn else []
            for i, logprob in zip(drawn, logprobs, strict=True):
                token, position = int(token_ids[i]), int(positions[i])
                sampled[i] = NonFinite(position) if logprob is None else Sampled([token], [logprob])
        return sampled if draws.counts is None else _joined(sampled, reached, draws.counts)

    def _rows_of(self, sequences: list[NewSequence]) -> _Rows:
        if sequences != self._rows.sequences:
            self._rows = _Rows(sequences)
        return self._rows


def _joined(rows: list[Sampled | NonFinite], reached: np.ndarray, counts: np.ndarray) -> list[Sampled | NonFinite]:
    """Return the result of each sequence. rows: the result of each of its rows. reached: see ``Draws``."""
    joined = []
    ends = counts.cumsum().tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        first = rows[start]
        if end - start > 1 and isinstance(first, Sampled):
            token_ids, logprobs = [*first.token_ids], [*first.logprobs]
            for row in range(start + 1, end):
                more = rows[row]
                if not reached[row] or isinstance(more, NonFinite):
                    break
                token_ids += more.token_ids
                logprobs += more.logprobs
            first = Sampled(token_ids, logprobs)
        joined.append(first)
    return joined


def _rows_by_mode(params: list[SamplingParams]) -> dict[str, list[int]]:
    """Group the rows that ask for logprobs by mode. With temperature 0 or 1, mode temperature equals mode raw."""
    rows: dict[str, list[int]] = {}
    for i, p in enumerate(params):
        if p.logprobs is not None:
            as_raw = p.logprobs_mode == TEMPERATURE and p.temperature in (0.0, 1.0)
            rows.setdefault(RAW if as_raw else p.logprobs_mode, []).append(i)
    return rows


def _in_place(logits: paddle.Tensor) -> np.ndarray:
    """Return the logits [R, V] in the same memory: copies to numpy and back take half as long as a step."""
    assert logits.is_contiguous() and logits.dtype == paddle.float32
    memory = (ctypes.c_float * logits.size).from_address(logits.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(logits.shape)


def _apply_biases(logits: paddle.Tensor, draws: Draws, rows: list[int]) -> None:
    """Add the logit_bias of ``rows`` to the logits, in place."""
    if not rows:
        return
    biases = [dict(draws.sequences[i].sampling.logit_bias) for i in rows]
    ids = [np.array(list(bias), np.int64) for bias in biases]
    added = np.concatenate([np.array(list(bias.values()), np.float32) for bias in biases])
    old = paddle.gather_nd(logits, paddle.to_tensor(_indices(rows, ids))).numpy()
    _put(logits, rows, ids, old + added)


def apply_penalties_and_bans(logits: paddle.Tensor, draws: Draws, penalised: list[int], banned: list[int]) -> None:
    """Change the logits in place: penalties in the ``penalised`` rows, bans in the ``banned`` ones."""
    if penalised:
        ids, values = _penalised_entries(logits, draws, penalised)
        _put(logits, penalised, ids, np.concatenate(values))
    if banned:
        of_rows = [draws.sequences[i].banned for i in banned]
        ids = [np.array([t for t in ids if t < logits.shape[1]], np.int64) for ids in of_rows]
        _put(logits, banned, ids, np.full(sum(map(len, ids)), -np.inf))


def _penalised_entries(
    logits: paddle.Tensor, draws: Draws, rows: list[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return, for each row, the ids of its known tokens and their new logits. The repetition penalty (CTRL, Keskar et
    al. 2019: divide a positive logit, multiply a negative one) counts prompt and output; presence and frequency
    (OpenAI) count the output only."""
    ids, counts = [], []
    for i in rows:
        known = draws.tokens[draws.numbers[i], : draws.positions[i]].astype(np.int64)
        seen, where = np.unique(known, return_inverse=True)
        ids.append(seen)
        counts.append(np.bincount(where[draws.sequences[i].num_prompt_tokens :], minlength=len(seen)))
    old = paddle.gather_nd(logits, paddle.to_tensor(_indices(rows, ids))).numpy()
    values = np.split(old, np.cumsum([len(seen) for seen in ids])[:-1])
    for k, i in enumerate(rows):
        params, row = draws.sequences[i].sampling, values[k]
        repeated = np.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        values[k] = repeated - params.presence_penalty * (counts[k] > 0) - params.frequency_penalty * counts[k]
    return ids, values


def _indices(rows: list[int], ids: list[np.ndarray]) -> np.ndarray:
    """Return the (row, id) pairs, int64 [N, 2]."""
    return np.stack([np.repeat(rows, [len(i) for i in ids]), np.concatenate(ids)], axis=1)


def _put(logits: paddle.Tensor, rows: list[int], ids: list[np.ndarray], values: np.ndarray) -> None:
    row, column = paddle.to_tensor(_indices(rows, ids).T.copy())
    paddle.index_put_(logits, (row, column), paddle.to_tensor(values.astype(np.float32)))


def _logprobs(ops: Ops, mode: str, draw: Draw, sequences: list[NewSequence], rows: list[int]) -> list[Logprob | None]:
    """Return the logprobs of ``rows``, which all ask for ``mode`` and have a token. None for a row that is not finite:
    a ban can hide this from the draw."""
    params = [sequences[i].sampling for i in rows]
    if len(rows) < len(sequences):
        draw = draw.picked(rows)
    batch = LogprobBatch(
        draw.token_ids,
        temperature=None if mode == RAW else divisors(p.temperature for p in params),
        cutoff=draw.cutoff if mode == PROCESSED else None,
    )
    return token_logprobs(ops, draw.logits, batch, wanted_of(params, draw.logits, draw.cutoff))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the random number of each token, float64 in [0, 1) with 53 random bits: a pure function of (seed, choice
    index, absolute position), integers in [0, 2^63). So neither the batch nor an abort followed by a resubmission
    changes which token is drawn.

    The hash is three rounds of the splitmix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", OOPSLA 2014), one per word of the key.
    """
    state = np.zeros(len(seeds), np.uint64)
    for word in (seeds, choices, positions):
        state = _mix((state ^ np.asarray(word).astype(np.uint64)) + _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
