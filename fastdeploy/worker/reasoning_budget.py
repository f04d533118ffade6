"""The limit of the tokens of reasoning: behind so many tokens, the tokens that end the reasoning are the only ones that
may be drawn.

Like the state of a grammar, all of it is a function of the sequence's tokens. So it is the same for a sequence that was
preempted or resubmitted, and behind drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy.core.reasoning import Reasoning
from fastdeploy.core.sampling_params import SamplingParams


class ReasoningBudget:
    """The budget of one sequence. prompt: its tokens without those of an earlier attempt, which are output. num_read:
    output tokens that were read."""

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int]):
        assert sampling.reasoning_max_tokens is not None
        self._budget, self._end = sampling.reasoning_max_tokens, sampling.reasoning_end
        opens, closes = sampling.reasoning_ids
        self._now = Reasoning(opens, closes).after_prompt(prompt)
        self.num_read = 0

    def read(self, output: Sequence[int]) -> None:
        """Read the next tokens of the output."""
        self.num_read += len(output)
        self._now = self._now.after(output)

    def forced(self, drafts: Iterable[int]) -> int | None:
        """Return the only id that may be drawn behind the tokens read and ``drafts``; None = any id."""
        behind = self._now.after(drafts)
        if not behind.is_open or behind.used < self._budget:
            return None
        return self._end[min(behind.used - self._budget, len(self._end) - 1)]
