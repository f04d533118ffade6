"""Messages between scheduler and runner: a StepPlan to the runner, a StepResult back.

All of them are plain values that msgspec can encode. No message refers to an object of the scheduler. A NewSequence, a
ScheduledChunk and a Sampled are not tracked by the garbage collector, since they cannot be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights


class NewSequence(msgspec.Struct, frozen=True, gc=False):
    """The constants of a sequence while it is in the batch. The runner gets them once.

    key: (request id, number of the choice). Random numbers depend on the number of the choice.
    num_prompt_tokens: later tokens count as output for penalties, including the output of an earlier attempt.
    banned: ids that may not be drawn at a position below banned_before (EOS and stop ids, until min_tokens is reached).
    ends: EOS and stop ids, for a sequence with a grammar: they may be drawn only where the grammar may end.
    """

    key: tuple[str, int]
    sampling: SamplingParams
    num_prompt_tokens: int
    banned: tuple[int, ...] = ()
    banned_before: int = 0
    ends: tuple[int, ...] = ()


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """What a step computes of one sequence: ``count`` tokens, at positions start, start+1, ... The last ``drafted`` of
    them are drafts: guesses of the tokens that the step is about to draw, which the step verifies.

    sequence: a small number. The runner keeps the tokens and the block table of each number, until a chunk with ``new``
    gives the number to another sequence.
    sample: draw the next token from the logits of the last known token. Such a chunk reaches the end of the known
    tokens. While a drawn token equals the draft at its position, draw the one behind it too.
    served: the weights that compute the chunk.
    token_ids: the tokens that the runner does not have yet. For a new sequence: all known tokens, from position 0, and
    the drafts. For others: the token at position ``start``, which the step before has drawn, or none, and the drafts;
    the last of them is at position ``start + count - 1``.
    blocks: the KV block ids that the runner does not have yet; they continue the block table. Position p is stored in
    block_table[p // block_size], at ``p % block_size``.
    new: set in the first chunk of a sequence, and after the sequence has lost its KV.
    prompt_logprobs: so many tokens, from the first of the chunk on, are followed by a prompt token whose logprob is
    asked for.
    routed_from: return the routing of the tokens from this position on to the last token that the step computes, drafts
    only where they are right. It may be below ``start``: the runner has kept the routing of those tokens beside their
    KV. -1 = none is asked for. Only a chunk with ``sample`` asks.
    """

    sequence: int
    start: int
    count: int
    sample: bool
    served: ServedWeights
    token_ids: list[int]
    blocks: list[int]
    new: NewSequence | None = None
    prompt_logprobs: int = 0
    drafted: int = 0
    routed_from: int = -1

    @property
    def num_known(self) -> int:
        """Tokens that the chunk computes, without drafts. 1 for a sequence that only waits for its next token."""
        return self.count - self.drafted


class BlockCopy(NamedTuple):
    """A copy of KV block ``source`` to ``target`` in every layer, made before the step computes."""

    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step: the copies first, then the chunks. A sequence has at most one chunk."""

    step_id: int
    chunks: list[ScheduledChunk]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, drafts included."""
        return sum(chunk.count for chunk in self.chunks)


class Sampled(msgspec.Struct, frozen=True, gc=False, tag=0):
    """The tokens that a step has drawn for one sequence: the drafts that were right, and one more. logprobs: one for
    each token, or none unless the sequence asks for logprobs.

    No token follows a row of logits that is not finite. So a step with drafts draws fewer tokens then, and the next
    step finds the row."""

    token_ids: list[int]
    logprobs: Sequence[Logprob] = ()


class NonFinite(msgspec.Struct, frozen=True, tag=1):
    """The row of logits for the token at ``position`` of the sequence has a NaN or +inf, or -inf for every token. No
    token can be drawn from it, and no logprob returned."""

    position: int


class NoneAllowed(msgspec.Struct, frozen=True, tag=2):
    """No id may be drawn at ``position`` of the sequence. why: for the client."""

    position: int
    why: str


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step. sampled: one entry per chunk of the plan, None if the chunk did not sample. elapsed_s: wall
    time of the step. prompt_logprobs: by index of the chunk, as many as the chunk asked for, or the first row that is
    not finite. routed: the rows that a chunk asked for with ``routed_from``, by index of the chunk (core/experts.py).
    A chunk without tokens in ``sampled`` has none."""

    step_id: int
    sampled: Sequence[Sampled | NonFinite | NoneAllowed | None]
    elapsed_s: float
    prompt_logprobs: dict[int, list[Logprob] | NonFinite] = {}
    routed: dict[int, bytes] = {}
