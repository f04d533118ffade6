"""The limit of the tokens of reasoning: behind so many tokens, the tokens that end the reasoning are the only ones that
may be drawn.

Like the state of a grammar, all of it is a function of the sequence's tokens. So it is the same for a sequence that was
preempted or resubmitted, and behind drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy.core.sampling_params import SamplingParams


class ReasoningBudget:
    """The budget of one sequence. prompt: its tokens without those of an earlier attempt, which are output. Reasoning
    is open behind the id that opens it, until the id that closes it. The tokens of the prompt do not count.

    num_read: output tokens that were read."""

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int]):
        assert sampling.reasoning_max_tokens is not None
        self._budget, self._end = sampling.reasoning_max_tokens, sampling.reasoning_end
        self._opens, self._closes = sampling.reasoning_ids
        self._is_open, self._used = self._after(prompt, False, 0)[0], 0
        self.num_read = 0

    def read(self, output: Sequence[int]) -> None:
        """Read the next tokens of the output."""
        self.num_read += len(output)
        self._is_open, self._used = self._after(output, self._is_open, self._used)

    def forced(self, drafts: Iterable[int]) -> int | None:
        """Return the only id that may be drawn behind the tokens read and ``drafts``; None = any id."""
        is_open, used = self._after(drafts, self._is_open, self._used)
        if not is_open or used < self._budget:
            return None
        return self._end[min(used - self._budget, len(self._end) - 1)]

    def _after(self, tokens: Iterable[int], is_open: bool, used: int) -> tuple[bool, int]:
        """Return whether reasoning is open behind ``tokens``, and how many tokens of reasoning there are."""
        for token in tokens:
            if not is_open:
                is_open = token == self._opens
            elif token == self._closes:
                is_open = False
            else:
                used += 1
        return is_open, used
