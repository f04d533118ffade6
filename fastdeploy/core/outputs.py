"""The labels of a token beside its id: the weights that sampled it, and its log probability."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# Stop reasons of aborts: two that a request asks for, and one for a request that has no replica with its adapter.
DEADLINE, QUEUE_TIMEOUT, ADAPTER_UNLOADED = "deadline", "queue_timeout", "adapter_unloaded"


class Span(msgspec.Struct, frozen=True):
    """A range of output tokens: [start, end) were sampled by weights (version, weight_epoch), with the adapter of this
    name and epoch, and this quantization ("" = none; see ServedWeights).

    recomputed: the request began under other weights. Since then its KV was lost (to a preemption, a cleared
    cache or an update with kv=recompute), and was computed again by later weights.
    """

    version: str
    weight_epoch: int
    start: int
    end: int
    recomputed: bool = False
    adapter: str = ""
    adapter_epoch: int = 0
    quantization: str = ""


def merge_spans(spans: list[Span], more: Sequence[Span]) -> None:
    """Append ``more`` to ``spans``, joining neighbours of the same weights."""
    for span in more:
        last = spans[-1] if spans else None
        if last and last == msgspec.structs.replace(span, start=last.start, end=last.end):
            spans[-1] = msgspec.structs.replace(last, end=span.end)
        else:
            spans.append(span)


def clip_spans(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Return the parts of ``spans`` that label output tokens [start, end)."""
    return [
        s
        if start <= s.start and s.end <= end
        else msgspec.structs.replace(s, start=max(s.start, start), end=min(s.end, end))
        for s in spans
        if s.start < end and s.end > start
    ]


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A log probability in the mode that the request asked for. top: (token id, logprob), best first, as many as asked
    for. kept: with SamplingParams.return_kept, the ids that top_k, top_p and min_p left to draw from, ascending, as
    little-endian int32; for greedy, the drawn id. Empty if none of the three is in use."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    kept: bytes = b""
