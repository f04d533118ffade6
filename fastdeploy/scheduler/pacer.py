"""How many tokens a step may compute, so that no step lasts longer than a pause may wait for it."""

from __future__ import annotations


class StepPacer:
    """Learns the cost of a prompt token from the steps that had some, and sizes chunks so that a step with prefill
    stays within ``max_step_s``. Quiescing waits for the step in flight: this is its bound.

    Results do not depend on chunk sizes (the ops guarantee it), so pacing by the clock keeps outputs reproducible.
    """

    ALIGN = 64  # rows; the kernels' tile height divides it
    FIRST_GUESS = 64  # tokens, before anything has been measured
    SMOOTHING = 0.3  # weight of the newest step without prefill
    MEMORY = 256  # prompt tokens that weigh as much as all that were measured before them

    def __init__(self, max_tokens: int, max_step_s: float):
        self.max_tokens = max_tokens
        self.max_step_s = max_step_s
        self._decode_s: float | None = None  # a step without prefill
        self._token_s: float | None = None  # each prompt token on top of that

    def budget(self) -> int:
        """Tokens the next step may compute, decodes included."""
        if self._token_s is None:
            return min(self.FIRST_GUESS, self.max_tokens)
        fit = int(max(self.max_step_s - (self._decode_s or 0.0), 0.0) / self._token_s) // self.ALIGN * self.ALIGN
        return min(max(fit, self.ALIGN), self.max_tokens)

    def observe(self, prefill_tokens: int, elapsed_s: float) -> None:
        """Take in a step that had ``prefill_tokens``. A few of them say little (their time is mostly the step's own),
        so they weigh little; but they do weigh, or small steps beside many decodes would never be found too small."""
        if prefill_tokens == 0:
            self._decode_s = _blend(self._decode_s, elapsed_s, self.SMOOTHING)
        else:
            cost = max(elapsed_s - (self._decode_s or 0.0), elapsed_s / 10) / prefill_tokens
            self._token_s = _blend(self._token_s, cost, prefill_tokens / (prefill_tokens + self.MEMORY))


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
