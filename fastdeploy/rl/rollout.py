"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


@dataclass(frozen=True)
class TokenSpan:
    """Output tokens [start, end) were sampled on ``replica`` by weights (version, weight_epoch).

    An epoch counts the commits of one start of one engine, which ``boot_id`` names. publication: number of the last
    publication of this client that those weights hold; 0 = weights from before the first.
    """

    version: str
    weight_epoch: int
    start: int
    end: int
    recomputed: bool = False
    replica: str = ""
    boot_id: str | None = None
    publication: int = 0


@dataclass(frozen=True)
class Rollout:
    """One choice, over all attempts that it took.

    logprobs: one per token, or None if not asked for. top_logprobs: {token id: logprob} per token where more than the
    sampled one were asked for. prompt_logprobs: one entry per token of ``prompt_ids``, the first of them None.
    spans: cover all tokens, in order. finish_reason: stop | length | abort (only by a deadline_s or max_queue_s that
    the caller set) | error (only within RolloutFailed). staleness: how many publications of this client the oldest
    token's weights lack.
    num_resumes: attempts beyond the first. replicas: url of each attempt.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    spans: list[TokenSpan]
    finish_reason: str
    stop_reason: int | str | None
    text: str
    seed: int
    index: int = 0
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_preempted: int = 0
    num_resumes: int = 0
    replicas: tuple[str, ...] = ()
    staleness: int = 0

    @property
    def min_version(self) -> str | None:
        """Label of the oldest weights that made a token; None without tokens."""
        return min(self.spans, key=_age, default=_NONE).version or None

    @property
    def max_version(self) -> str | None:
        """Label of the newest weights that made a token; None without tokens."""
        return max(self.spans, key=_age, default=_NONE).version or None


_NONE = TokenSpan("", 0, 0, 0)


def _age(span: TokenSpan) -> tuple[int, int]:
    return span.publication, span.weight_epoch
