"""The chunks of a plan: what each tells the runner, which knows the sequences by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy.core.plan import NewSequence, ScheduledChunk
from fastdeploy.core.request import Request
from fastdeploy.core.runner import ModelInfo


class RunnerSequences:
    """The maker of the chunks of a plan. A chunk has only what the runner does not know of a request.

    eos_token_ids: a new sequence may not draw these before it has min_tokens."""

    def __init__(self, info: ModelInfo):
        self.eos_token_ids = info.eos_token_ids
        self._vocab_size = info.vocab_size
        self._free: list[int] = []  # numbers that the runner knows and that no request has
        self._num_numbers = 0

    def chunk(self, request: Request, count: int, drafts: Sequence[int] = ()) -> ScheduledChunk:
        """Return the chunk of the next ``count`` tokens, and of ``drafts`` behind the last one. It has all that the
        runner does not know of the request. The plan must reach the runner, even if the step is given up, since no
        known token is sent twice."""
        start, token_ids, blocks = request.num_computed, request.token_ids, request.blocks
        number, new = request.sequence, None
        if number is None:
            number, new = self._number(request), self._new_sequence(request)
        unsent = token_ids[request.num_sent_tokens :]
        request.num_sent_tokens = len(token_ids)
        unsent += drafts
        new_blocks: list[int] = []
        if len(blocks) > request.num_sent_blocks:
            new_blocks = blocks[request.num_sent_blocks :].tolist()
            request.num_sent_blocks = len(blocks)
        sample = start + count == len(token_ids)
        return ScheduledChunk(
            number,
            start,
            count + len(drafts),
            sample,
            request.model.served,
            unsent,
            new_blocks,
            new,
            0 if request.sampling.prompt_logprobs is None else _num_prompt_logprobs(request, count),
            len(drafts),
            request.unsent_row if sample else -1,
        )

    def forget(self, request: Request) -> None:
        """Take back the number of a request, which keeps its KV. Its next chunk has all again."""
        if request.sequence is not None:
            self._free.append(request.sequence)
            request.sequence = None

    def _number(self, request: Request) -> int:
        """Give the request a number at the runner, which knows nothing of the request."""
        if not self._free:
            self._free.append(self._num_numbers)
            self._num_numbers += 1
        request.sequence = number = self._free.pop()
        request.num_sent_tokens = request.num_sent_blocks = 0
        return number

    def _new_sequence(self, request: Request) -> NewSequence:
        sampling = request.sampling
        known = self.eos_token_ids + sampling.stop_token_ids
        ends = tuple(token for token in known if token < self._vocab_size)
        banned = ends if sampling.min_tokens else ()
        banned_before = request.num_prompt_tokens + sampling.min_tokens if banned else 0
        ends = ends if sampling.grammar else ()
        return NewSequence(request.key, sampling, request.num_new_prompt_tokens, banned, banned_before, ends)

    def check_integrity(self, batch: Iterable[Request]) -> None:
        """Assert that every number is free or belongs to one request. batch: all requests that may have a number."""
        numbers = [request.sequence for request in batch if request.sequence is not None] + self._free
        assert sorted(numbers) == list(range(self._num_numbers)), "a sequence number is lost, or given twice"


def _num_prompt_logprobs(request: Request, count: int) -> int:
    """Return how many of the next ``count`` tokens are followed by a prompt token whose logprob is wanted."""
    left = request.num_prompt_tokens - 1 - request.num_computed
    return min(count, max(left, 0)) if request.wants_prompt_logprobs else 0
