"""Number of prompt tokens in a step, chosen so that no step takes too long."""

from __future__ import annotations

from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
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
