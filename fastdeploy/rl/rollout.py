"""The results of a generation: Rollout, and TokenSpan for the weights that sampled its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.experts import RoutedExperts

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


@dataclass(frozen=True)
class TokenSpan:
    """Output tokens [start, end) were sampled by weights (version, weight_epoch).

    weight_epoch counts the commits of one engine since its start, which ``boot_id`` names. lora_name, adapter_epoch:
    the adapter, and the number of its load there, which no other load of the name has; None without an adapter.
    publication: number of this client's last publication that those weights contain; 0: weights from before the first
    publication. With an adapter, this client's loads of that name are counted instead. quantization: of the weights,
    such as "int8"; None without.
    """

    version: str
    weight_epoch: int
    start: int
    end: int
    recomputed: bool = False
    boot_id: str | None = None
    publication: int = 0
    lora_name: str | None = None
    adapter_epoch: int = 0
    quantization: str | None = None


@dataclass(frozen=True)
class Rollout:
    """One finished choice, joined from all its attempts.

    logprobs: one per token, or None if not requested. top_logprobs: {token id: logprob} per token, if requested.
    sampling_masks, sampling_mask_logprobs: per token, the ids that it was drawn from, and their logprobs, with the
    parameters return_sampling_mask and return_sampling_mask_logprobs. Scorer.logprobs takes them.
    routed_experts: with the parameter routed_experts, the experts that computed each token of prompt and answer but the
    last one, from the parameter routed_experts_start on; None without a token. ``routed_experts.array()`` has their
    ids, [rows, experts layers, top_k]. A row is that of the computation that the next token was sampled from.
    prompt_logprobs: one entry per token of ``prompt_ids``; the first is None. spans: cover all tokens, in order.
    finish_reason: stop | length | abort (only by the caller's deadline_s or max_queue_s, or because its adapter was
    unloaded: stop_reason "adapter_unloaded") | error (only within RolloutFailed). staleness: number of this client's
    publications (of its loads of the adapter, for a generation with an adapter) that the oldest token's weights lack.
    num_resumes: attempts after the first. cached_tokens: tokens of the prompt that were in the prefix cache when choice
    0 began, in the attempt that made the first token; None if its stream broke off, so that the server could not say.
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
    sampling_masks: list[list[int]] | None = None
    sampling_mask_logprobs: list[list[float]] | None = None
    routed_experts: RoutedExperts | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_preempted: int = 0
    num_resumes: int = 0
    staleness: int = 0
    cached_tokens: int | None = None

    @property
    def min_version(self) -> str | None:
        """Label of the oldest weights that made a token; None without tokens."""
        return min(self.spans, key=_age, default=_NONE).version or None

    @property
    def max_version(self) -> str | None:
        """Label of the newest weights that made a token; None without tokens."""
        return max(self.spans, key=_age, default=_NONE).version or None


_NONE = TokenSpan("", 0, 0, 0)


def _age(span: TokenSpan) -> tuple[int, int, int]:
    return span.publication, span.weight_epoch, span.adapter_epoch
