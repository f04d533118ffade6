"""The version spans of a stream, joined from its chunks, and the checks of an update while streams run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from acceptance.lib.verdicts import Check
from benchmarks.lib.timeline import StreamLog, gaps, is_prefix, uncovered


class VersionSpan(NamedTuple):
    """Output tokens [start, end) were sampled by the weights (version, weight_epoch)."""

    version: str
    weight_epoch: int
    start: int
    end: int


class BadSpans(Exception):
    """A token of the stream is in no span, or in two."""


def version_spans(log: StreamLog) -> list[VersionSpan]:
    """Return the spans of all chunks; adjacent spans of the same weights are joined. Raises BadSpans."""
    all_spans = [
        VersionSpan(str(raw["version"]), raw["weight_epoch"], raw["start"], raw["end"])
        for event in log.tokens
        for raw in event.weight_versions
    ]
    if fault := uncovered([(span.start, span.end) for span in all_spans], log.num_tokens):
        raise BadSpans(f"{log.request_id}: {fault}")
    spans: list[VersionSpan] = []
    for span in all_spans:
        if spans and spans[-1][:2] == span[:2]:
            spans[-1] = spans[-1]._replace(end=span.end)
        else:
            spans.append(span)
    return spans


def judge_update(
    logs: Sequence[StreamLog], undisturbed: Sequence[StreamLog], after: StreamLog, version: str, tokens: int
) -> list[Check]:
    """Check streams during which the weights were updated to ``version``. undisturbed: the same prompts under the old
    weights, in the same order. after: a request sent after the update was answered."""
    scenario = "update under live streams"
    whole = [log for log in logs if log.ended_once and log.reason == "length" and log.num_tokens == tokens]
    switches: list[int] = []
    same: list[StreamLog] = []
    problems: list[str] = []
    for log, old in zip(logs, undisturbed, strict=True):
        try:
            spans = version_spans(log)
        except BadSpans as bad:
            problems.append(str(bad))
            continue
        if len(spans) == 2 and spans[1].version == version and spans[0].weight_epoch < spans[1].weight_epoch:
            switches.append(spans[1].start)
            if is_prefix(log.token_ids[: spans[1].start], old.token_ids):
                same.append(log)
    try:
        fresh = version_spans(after)
    except BadSpans as bad:
        fresh, problems = [], [*problems, str(bad)]
    where = f", at token {min(switches)} to {max(switches)}" if switches else ""
    trouble = f"; {problems[0]}" if problems else ""
    longest = max((gap for log in logs for gap in gaps(log)), default=0.0)
    labels = ", ".join(f"{span.version} for {span.end - span.start} tokens" for span in fresh) or "no label"
    checks = [
        Check(scenario, promise, f"{len(right)} of {len(logs)}{more}", 0 < len(right) == len(logs))
        for promise, right, more in (
            ("streams go on and complete", whole, f", {tokens} tokens each, longest gap {longest * 1000:.0f} ms"),
            ("each token is labelled, and the label switches at one token", switches, f" streams{where}{trouble}"),
            ("up to the switch the tokens are those of the old weights", same, " streams"),
        )
    ]
    new = "a request sent afterwards is made by the new weights alone"
    return [*checks, Check(scenario, new, labels, len(fresh) == 1 and fresh[0].version == version)]
