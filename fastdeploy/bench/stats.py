"""Figures of a load: throughput, and percentiles of latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy.bench.timeline import StreamLog, gaps

PERCENTS = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the two nearest values; 0 without values."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles (by percent) of ``count`` values, in seconds; all zero without values."""

    count: int
    mean: float
    at: dict[float, float]


@dataclass(frozen=True)
class ServingStats:
    """Figures of a load. ttft: from sending a request to its first token. tpot: mean time per token after the first, by
    request. itl: gaps between consecutive token chunks of all requests. e2e: from sending to the final chunk.
    duration_s: from the first request sent to the last one ended. tokens_per_s: output tokens over duration_s."""

    completed: int
    failed: int
    errors: tuple[str, ...]
    duration_s: float
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread


def spread(values: Sequence[float], percents: Sequence[float] = PERCENTS) -> Spread:
    """Return mean and percentiles of ``values``."""
    return Spread(len(values), sum(values) / max(len(values), 1), {p: percentile(values, p) for p in percents})


def summarize(logs: Sequence[StreamLog], percents: Sequence[float] = PERCENTS) -> ServingStats:
    """Return the figures of completed requests: those with a token and with exactly one end."""
    good = [log for log in logs if log.ended_once and log.tokens]
    bad = [log for log in logs if not (log.ended_once and log.tokens)]
    tokens = sum(log.num_tokens for log in good)
    duration = max((log.finals[0][0] for log in good), default=0.0) - min((log.sent_at for log in logs), default=0.0)
    duration = duration if good else 0.0
    tpot = [(log.tokens[-1].at - log.tokens[0].at) / (log.num_tokens - 1) for log in good if log.num_tokens > 1]
    return ServingStats(
        completed=len(good),
        failed=len(bad),
        errors=tuple(sorted({log.error or f"HTTP {log.status}, {len(log.finals)} finals" for log in bad})),
        duration_s=duration,
        output_tokens=tokens,
        tokens_per_s=tokens / duration if duration else 0.0,
        requests_per_s=len(good) / duration if duration else 0.0,
        ttft=spread([log.tokens[0].at - log.sent_at for log in good], percents),
        tpot=spread(tpot, percents),
        itl=spread([gap for log in good for gap in gaps(log)], percents),
        e2e=spread([log.finals[0][0] - log.sent_at for log in good], percents),
    )
