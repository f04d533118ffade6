"""Number of prompt tokens in a step, chosen so that no step takes too long."""

from __future__ import annotations


class StepPacer:
    """Learns the cost of a prompt token from steps with many of them, and sizes chunks so that a step with prefill
    stays within ``max_step_s`` seconds: a pause may have to wait for the step in flight.

    Results do not depend on chunk sizes (the ops guarantee it), so outputs stay reproducible.
    """

    ALIGN = 64  # rows; a multiple of the kernels' tile height. The smallest budget, and the smallest step to learn from
    FIRST_GUESS = 64  # tokens, before anything has been measured
    SMOOTHING = 0.3  # weight of the newest measurement

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

    def _smoothed(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.SMOOTHING * (new - old)
