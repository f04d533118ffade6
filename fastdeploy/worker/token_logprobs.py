"""Log probabilities of tokens, as a request asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch

NO_IDS = np.empty(0, "<i4")
MIN_TEMPERATURE = 1e-30  # a division by a smaller temperature overflows float32
NEVER = -9999.0  # of a token that cannot be drawn, as in vLLM: JSON has no -inf


class Wanted(NamedTuple):
    """What is asked of one row: the ``top`` best tokens, or the tokens ``ids``. mask: the ids of its sampling mask.
    mask_logprobs: their logprobs too. The arrays are int32."""

    top: int = 0
    ids: np.ndarray = NO_IDS
    mask: np.ndarray = NO_IDS
    mask_logprobs: bool = False

    @property
    def others(self) -> np.ndarray:
        """The ids whose logprobs the ops compute beside the best."""
        return np.concatenate([self.ids, self.mask]) if self.mask_logprobs else self.ids


NOTHING = Wanted()  # beside the logprob of the token: most requests ask for no more


def token_logprobs(
    ops: Ops, logits: paddle.Tensor, batch: LogprobBatch, wanted: Sequence[Wanted]
) -> list[Logprob | None]:
    """Return the log softmax of each row of logits [S, V] at its token, with what is wanted. Best tokens of probability
    0 are left out. None for a row that is not finite."""
    others = [NO_IDS if w is NOTHING else w.others for w in wanted]
    lengths = [len(ids) for ids in others]
    if any(lengths):
        batch = batch._replace(other_ids=np.concatenate(others), other_ends=np.cumsum(lengths))
    found = ops.logprobs(logits, batch._replace(top=min(max(w.top for w in wanted), logits.shape[1])))
    counts = (found.top_values > -np.inf).sum(1).tolist()
    result: list[Logprob | None] = []
    end = 0
    for i, (value, rank) in enumerate(zip(found.chosen.tolist(), found.ranks.tolist(), strict=True)):
        start, end = end, end + lengths[i]
        if math.isnan(value):
            result.append(None)
        elif wanted[i] is NOTHING:
            result.append(Logprob(value, rank))
        else:
            best = min(counts[i], wanted[i].top)
            top = found.top_ids[i, :best], found.top_values[i, :best]
            result.append(_entry(value, rank, wanted[i], top, found.others[start:end]))
    return result


def _entry(value: float, rank: int, wanted: Wanted, top: tuple[np.ndarray, np.ndarray], others: np.ndarray) -> Logprob:
    """Return the entry of one row. top: ids and logprobs of its best tokens. others: logprobs of ``wanted.others``."""
    own = len(wanted.ids)
    ids, logprobs = (wanted.ids, np.maximum(others[:own], NEVER)) if own else top
    return Logprob(
        value, rank, ids.tobytes(), logprobs.tobytes(), wanted.mask.tobytes(), others[own:].tobytes()
    )  # fmt: skip


def wanted_of(params: Sequence[SamplingParams], logits: paddle.Tensor, cutoff: Cutoff | None) -> list[Wanted]:
    """Return what each row asks for. logits [S, V]: those that the tokens were drawn from. cutoff: of the draw."""
    masked = [i for i, p in enumerate(params) if p.return_sampling_mask and (p.limits_tokens or not p.temperature)]
    masks: dict[int, np.ndarray] = {}
    if masked and cutoff is not None:
        rows = np.from_dlpack(logits)  # the same memory: numpy() copies 20 MB, which takes longer than the rest
        masks = {i: cutoff.kept(i, rows[i]).astype("<i4") for i in masked}
    return [
        Wanted(p.logprobs or 0, ids_of(p), masks.get(i, NO_IDS), p.return_sampling_mask_logprobs)
        if p.logprobs or p.logprob_token_ids or i in masks
        else NOTHING
        for i, p in enumerate(params)
    ]


def ids_of(params: SamplingParams) -> np.ndarray:
    """Return the ids whose logprobs are asked for, int32."""
    return np.array(params.logprob_token_ids, "<i4") if params.logprob_token_ids else NO_IDS


def divisors(temperatures: Iterable[float]) -> np.ndarray:
    """Return the temperatures as the ops take them, float32: greedy rows count as 1."""
    return np.array([max(t, MIN_TEMPERATURE) if t else 1.0 for t in temperatures], np.float32)
