from __future__ import annotations

import pytest

from benchmarks.lib.spans import BadSpans, VersionSpan, judge_update, version_spans
from benchmarks.lib.timeline import StreamLog, TokenEvent


def stream(*versions: str, ids: list[int] | None = None) -> StreamLog:
    """Make a stream of one token per chunk. Token k has versions[k]; a version's epoch is its order of appearance."""
    order = list(dict.fromkeys(versions))
    events = [
        TokenEvent(
            1 + i / 10,
            [ids[i] if ids else i],
            "",
            [{"version": v, "weight_epoch": order.index(v), "start": i, "end": i + 1}],
        )
        for i, v in enumerate(versions)
    ]
    return StreamLog("r", 0.0, 200, events, [(9.0, "length")], done_markers=1)


def test_adjacent_spans_of_chunks_are_joined():
    assert version_spans(stream("a", "a", "b")) == [VersionSpan("a", 0, 0, 2), VersionSpan("b", 1, 2, 3)]


@pytest.mark.parametrize("damage", ["gap", "missing", "overlap", "empty"])
def test_a_token_in_no_span_or_in_two_is_an_error(damage: str):
    log = stream("a", "a", "b")
    spans = log.tokens[1].weight_versions
    match damage:
        case "gap":
            spans[0]["start"] += 1
        case "missing":
            log.tokens[2].weight_versions = []
        case "overlap":
            spans.append(dict(spans[0]))
        case "empty":
            spans[0]["end"] = spans[0]["start"]
    with pytest.raises(BadSpans):
        version_spans(log)


def failed(log: StreamLog, old: StreamLog, after: StreamLog) -> list[str]:
    return [check.promise for check in judge_update([log], [old], after, "new", 4) if not check.ok]


def test_an_update_under_a_live_stream():
    good, old, after = stream("old", "old", "new", "new"), stream(*["old"] * 4), stream("new")
    assert failed(good, old, after) == []
    assert failed(stream(*["old"] * 4), old, after) == [
        "each token is labelled, and the label switches at one token",
        "up to the switch the tokens are those of the old weights",
    ]
    assert "each token is labelled, and the label switches at one token" in failed(
        stream("old", "new", "old", "new"), old, after
    )
    assert failed(stream("old", "old", "new", "new", ids=[0, 9, 2, 3]), old, after) == [
        "up to the switch the tokens are those of the old weights"
    ]
    assert failed(stream("old", "old", "new"), old, after) == ["streams go on and complete"]
    assert failed(good, old, stream("old")) == ["a request sent afterwards is made by the new weights alone"]
    assert failed(good, old, stream("old", "new")) == ["a request sent afterwards is made by the new weights alone"]
