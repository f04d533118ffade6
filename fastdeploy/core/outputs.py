"""The labels of a token beside its id: the weights that sampled it, and its log probability."""

from __future__ import annotations

from array import array
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


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A log probability in the mode that the request asked for.

    rank: 1 + number of tokens that are more probable. top_ids, top_logprobs: as many of the best tokens as asked for,
    best first; with SamplingParams.logprob_token_ids, these ids instead. mask_ids: with
    SamplingParams.return_sampling_mask, the ids that top_k, top_p and min_p left to draw from, ascending; for greedy,
    the drawn id; empty if none of the three is in use. mask_logprobs: theirs, with
    SamplingParams.return_sampling_mask_logprobs. Ids are little-endian int32, log probabilities float32: a pair has 8
    bytes here, and 100 as Python objects."""

    logprob: float
    rank: int = 1
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    mask_ids: bytes = b""
    mask_logprobs: bytes = b""

    @classmethod
    def of(cls, logprob: float, top: Sequence[tuple[int, float]] = (), rank: int = 1) -> Logprob:
        """Return an entry whose best tokens are given as pairs (id, logprob)."""
        ids, logprobs = [token for token, _ in top], [value for _, value in top]
        return cls(logprob, rank, array("i", ids).tobytes(), array("f", logprobs).tobytes())

    @property
    def num_top(self) -> int:
        """Number of entries in ``top``."""
        return len(self.top_ids) // 4

    @property
    def top(self) -> list[tuple[int, float]]:
        """The pairs (id, logprob), made anew at each call."""
        return list(zip(memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f"), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return len(self.top_ids) + len(self.top_logprobs) + len(self.mask_ids) + len(self.mask_logprobs)
