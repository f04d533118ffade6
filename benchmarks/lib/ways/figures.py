"""The figures of one run: speed, silence, lag, mismatch, accuracy, lengths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.lib.ways.record import Mismatch, Record, TokenTime

QUIET_S = 0.05
"""A longer time between two steps with tokens is a silence. A step of the embedded model takes some 10 ms, and a slow
one, beside the trainer's backward pass, some 30 ms."""

Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Silence:
    """Times in which no stream got a token. per_update: seconds, all silences of the run over its commits. longest:
    seconds."""

    per_update: float
    longest: float


def silence(times: Sequence[TokenTime]) -> Silence:
    """Return the silences between the first token of the run and the first token after its last commit."""
    commits = max((step.weight_epoch for step in times), default=0)
    end = next((step.at for step in times if step.weight_epoch == commits), 0.0)
    gaps = [b.at - a.at for a, b in pairwise(times) if b.at <= end and b.at - a.at > QUIET_S]
    return Silence(sum(gaps) / max(commits, 1), max(gaps, default=0.0))


def lag(record: Record) -> Counter[int]:
    """Return the number of trained tokens by version lag: publications that were committed when the rollout was
    trained, and that the weights which sampled the token lack."""
    commits = sorted((sync.committed, sync.publication) for sync in record.syncs)
    found: Counter[int] = Counter()
    for rollout in record.of_fate("trained"):
        at = bisect_right(commits, (rollout.t, 1 << 30))
        newest = commits[at - 1][1] if at else 0
        for publication, start, end in rollout.spans:
            found[max(newest - publication, 0)] += end - start
    return found


def lengths(record: Record) -> list[int]:
    """Return the tokens of each answer that has ended."""
    return [rollout.tokens for rollout in record.rollouts if rollout.fate != "in_flight"]


def smallest(counts: Counter[int], percent: float) -> int:
    """Return the smallest value that at least ``percent`` of all counted values do not exceed; 0 without values."""
    values = sorted(counts.elements())
    return values[max(math.ceil(percent / 100 * len(values)) - 1, 0)] if values else 0


def mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(counts.total(), 1)


def goodput(record: Record, bucket_s: float) -> Series:
    """Return (middle of the bucket, tokens per second that were trained in the end). A rollout's tokens count evenly
    over the time of its generation."""
    count = max(int(np.ceil(record.seconds / bucket_s)), 1)
    edges = np.arange(count + 1) * bucket_s
    tokens = np.zeros(count)
    for rollout in record.of_fate("trained"):
        length = max(rollout.ended - rollout.started, 1e-6)
        inside = np.clip(edges, rollout.started, rollout.started + length)
        tokens += np.diff(inside) / length * rollout.tokens
    return [(float(edge + bucket_s / 2), float(n / bucket_s)) for edge, n in zip(edges, tokens, strict=False)]


def accuracy(record: Record) -> tuple[Series, Series]:
    """Return the held-out accuracy against seconds, and against trained tokens."""
    by_time: Series = []
    by_tokens: Series = []
    for one in record.evals:
        tokens = sum(update.tokens for update in record.updates if update.update <= one.update)
        by_time.append((one.t, one.solved / one.problems))
        by_tokens.append((tokens, one.solved / one.problems))
    return by_time, by_tokens


def joined(found: Sequence[Mismatch | None]) -> Mismatch | None:
    """Return the mismatch over all tokens of several; None if none of them has a token."""
    some = [one for one in found if one is not None]
    if not some:
        return None
    tokens = sum(one.tokens for one in some)
    kl = sum(one.kl * one.tokens for one in some) / tokens
    return Mismatch(tokens, max(one.max_abs for one in some), kl, max(one.ratio_max for one in some))


def wrong_mismatches(record: Record) -> list[str]:
    """Return a sentence for each mismatch of a run that is not as it must be. It must be exactly 0 where all KV is of
    the weights that sampled the token. In a control run it must not be 0, or the control proves nothing."""
    whole, mixed = joined([u.mismatch for u in record.updates]), joined([u.mixed for u in record.updates])
    wrong = []
    if whole is None:
        wrong.append("no answer was compared")
    elif record.way.stale_kv and whole.max_abs == 0.0:
        wrong.append("the stale KV does not show")
    elif not record.way.stale_kv and whole.max_abs != 0.0:
        wrong.append(f"logprobs of answers of one version differ by up to {whole.max_abs:g}")
    if mixed is not None and mixed.max_abs != 0.0 and not record.way.mixes_kv:
        wrong.append(f"logprobs of tokens whose KV is of one version differ by up to {mixed.max_abs:g}")
    return wrong
