"""The contract between scheduler and worker: one StepPlan down, one StepResult up. No Paddle here.

What is made for every sequence in every step is a msgspec.Struct, which takes a quarter of a NamedTuple's time to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights


class ScheduledChunk(msgspec.Struct, frozen=True):
    """Compute ``token_ids`` at positions start, start+1, ... of one sequence.

    block_table: KV block ids, of type "i"; position p lives in slot ``p % block_size`` of block_table[p // block_size].
    sample: the chunk reaches the end of what is known, so draw the next token, at absolute position
    ``start + len(token_ids)``, from the logits of the last row.
    key: names the sequence; its second part, the number of the choice, keys random numbers.
    all_token_ids / num_prompt_tokens: the whole sequence known so far (read-only view), for penalties: what follows the
    first num_prompt_tokens is output, be it of an earlier attempt.
    banned: ids that may not be drawn (EOS and stop ids while min_tokens is not reached).
    prompt_logprobs: how many of its tokens, from the first, have a prompt token behind them whose logprob is asked for.
    request: the scheduler's own handle; a runner does not look at it.
    served: the weights of the sequence's scope, fixed at launch.
    """

    key: tuple[str, int]
    token_ids: Sequence[int]
    start: int
    block_table: array[int]
    sample: bool
    sampling: SamplingParams
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    banned: tuple[int, ...]
    request: Any = None
    prompt_logprobs: int = 0
    served: ServedWeights = ServedWeights()


class BlockCopy(NamedTuple):
    """Copy KV block ``source`` to ``target`` in every layer before the step computes."""

    source: int
    target: int


class StepPlan(NamedTuple):
    """What one step computes."""

    step_id: int
    chunks: list[ScheduledChunk]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)


class Sampled(msgspec.Struct, frozen=True):
    """``logprob`` is None unless the chunk's sampling asked for logprobs."""

    token_id: int
    logprob: Logprob | None


class NonFinite(msgspec.Struct, frozen=True):
    """The row of logits for the token at ``position`` of the sequence has a NaN or +inf, or -inf for every token. So no
    token can be drawn there, or no logprob returned."""

    position: int


class StepResult(NamedTuple):
    """``sampled`` is aligned with plan.chunks; None where the chunk did not sample. elapsed_s: wall time of the step.
    prompt_logprobs: by index of the chunk, as many as the chunk asked for, or the first row that is not finite."""

    step_id: int
    sampled: list[Sampled | NonFinite | None]
    elapsed_s: float
    prompt_logprobs: dict[int, list[Logprob] | NonFinite] = {}
