"""The chunks of a plan: how many prompt tokens a step computes, so that it does not take too long; and what each chunk
tells the runner, which knows the sequences by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.request import Request
from fastdeploy.core.runner import ModelInfo, Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights


class StepPacer:
    """Learns the cost of a prompt token from steps with many of them, and sizes chunks so that a step with prefill
    stays within ``max_step_s`` seconds: a pause may have to wait for the step in flight.

    Results do not depend on chunk sizes (the ops guarantee it), so outputs stay reproducible.
    """

    ALIGN = 64  # rows; a multiple of the kernels' tile height. The smallest budget, and the smallest step to learn from
    FIRST_GUESS = 64  # tokens, before anything has been measured
    SMOOTHING = 0.3  # weight of the newest measurement
    WARM_UP_TOKENS = 256

    def __init__(self, max_tokens: int, max_step_s: float):
        self.max_tokens = max_tokens
        self.max_step_s = max_step_s
        self._decode_s: float | None = None  # a step without prefill
        self._token_s: float | None = None  # each prompt token on top of that

    def budget(self, num_decodes: int) -> int:
        """Return how many prompt tokens the next step may compute beside ``num_decodes`` tokens of running requests."""
        fit = self.FIRST_GUESS
        if self._token_s is not None:
            fit = int(max(self.max_step_s - (self._decode_s or 0.0), 0.0) / self._token_s)
        return max(min(max(fit // self.ALIGN, 1) * self.ALIGN, self.max_tokens - num_decodes), 0)

    def observe(self, prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that had ``prompt_tokens``."""
        if prompt_tokens == 0:
            self._decode_s = self._smoothed(self._decode_s, elapsed_s)
        elif prompt_tokens >= self.ALIGN:
            cost = max(elapsed_s - (self._decode_s or 0.0), elapsed_s / 10) / prompt_tokens
            self._token_s = self._smoothed(self._token_s, cost)

    def warm_up(self, runner: Runner) -> None:
        """Compute a prompt twice and one more token, and drop the results, so that the first request is not slow. The
        first step touches the memory. The next two give the cost of a step, in place of the small first guess.

        The KV goes into free blocks. A later request writes each block before it reads the block.
        """
        info = runner.info
        count = min(self.WARM_UP_TOKENS, self.max_tokens, info.max_model_len - 1)
        if count < 1:
            return
        tokens = [i % info.vocab_size for i in range(count + 1)]
        _elapsed_s(runner, tokens, 0, count)  # not observed: the first step is slow
        self.observe(count, _elapsed_s(runner, tokens, 0, count))
        self.observe(0, _elapsed_s(runner, tokens, count, 1))

    def _smoothed(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.SMOOTHING * (new - old)


def _elapsed_s(runner: Runner, tokens: list[int], start: int, count: int) -> float:
    end = start + count
    blocks = list(range(-(-len(tokens) // runner.info.block_size)))
    new = NewSequence(("warm-up", 0), SamplingParams(temperature=0.0), end)
    chunk = ScheduledChunk(0, start, count, True, ServedWeights(), tokens[:end], blocks, new)
    result = runner.execute(StepPlan(0, [chunk], []))
    assert result is not None, "a step without between_layers cannot be abandoned"
    return result.elapsed_s


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
        return ScheduledChunk(
            number,
            start,
            count + len(drafts),
            start + count == len(token_ids),
            request.model.served,
            unsent,
            new_blocks,
            new,
            0 if request.sampling.prompt_logprobs is None else _num_prompt_logprobs(request, count),
            len(drafts),
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
        banned: tuple[int, ...] = ()
        if sampling.min_tokens:
            known = self.eos_token_ids + sampling.stop_token_ids
            banned = tuple(token for token in known if token < self._vocab_size)
        banned_before = request.num_prompt_tokens + sampling.min_tokens if banned else 0
        return NewSequence(request.key, sampling, request.num_new_prompt_tokens, banned, banned_before)

    def check_integrity(self, batch: Iterable[Request]) -> None:
        """Assert that every number is free or belongs to one request. batch: all requests that may have a number."""
        numbers = [request.sequence for request in batch if request.sequence is not None] + self._free
        assert sorted(numbers) == list(range(self._num_numbers)), "a sequence number is lost, or given twice"


def _num_prompt_logprobs(request: Request, count: int) -> int:
    """Return how many of the next ``count`` tokens are followed by a prompt token whose logprob is wanted."""
    left = request.num_prompt_tokens - 1 - request.num_computed
    return min(count, max(left, 0)) if request.wants_prompt_logprobs else 0
