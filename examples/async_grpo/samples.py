"""What a trainer learns from: samples, and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy.rl.rollout import Rollout, TokenSpan


@dataclass(frozen=True)
class Span:
    """Sampled tokens [start, end) of a sample, and the publication whose weights sampled them."""

    publication: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """A prompt and the tokens after it.

    sampled: bool [tokens], those that the model sampled. Others, such as replies of tools, are not learned. logprobs:
    float32 [sampled tokens], as the server returned them. spans: of the sampled tokens, counted without the others.
    routed_experts: of a Mixture of Experts, the experts that computed each token but the last one, [prompt tokens +
    tokens - 1, layers with experts, top_k]; None: of another model, or not known.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    sampled: np.ndarray
    logprobs: np.ndarray
    spans: Sequence[Span]
    num_resumes: int = 0
    num_preempted: int = 0
    routed_experts: np.ndarray | None = None

    @property
    def publications(self) -> np.ndarray:
        """The publication that made each sampled token, int64 [sampled tokens]."""
        return np.repeat([span.publication for span in self.spans], [span.end - span.start for span in self.spans])


def sample_of(rollout: Rollout) -> Sample:
    """Return the sample of one answer: all its tokens are sampled."""
    spans = [Span(publication_of(span), span.start, span.end) for span in rollout.spans]
    sampled, logprobs = np.ones(len(rollout.token_ids), bool), np.asarray(rollout.logprobs, np.float32)
    counts = rollout.num_resumes, rollout.num_preempted
    routed = None if rollout.routed_experts is None else rollout.routed_experts.array()
    return Sample(rollout.prompt_ids, rollout.token_ids, sampled, logprobs, spans, *counts, routed)


def publication_of(span: TokenSpan) -> int:
    """Return the publication whose weights sampled a span. The trainer publishes each under its number."""
    return int(span.version)


@dataclass(frozen=True)
class Group:
    """The samples of one problem. rewards: 1.0 for a right answer, else 0.0. started, ended: seconds of the run."""

    number: int
    samples: Sequence[Sample]
    rewards: Sequence[float]
    started: float
    ended: float

    @property
    def oldest(self) -> int:
        """The first publication that made one of its tokens."""
        return min(span.publication for sample in self.samples for span in sample.spans)
