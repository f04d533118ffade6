from __future__ import annotations

from collections.abc import Callable

import pytest

from acceptance.lib.verdicts import BadSpans, VersionSpan, check_update, version_spans
from fastdeploy.bench.timeline import StreamLog, TokenEvent


def stream(*versions: str, ids: list[int] | None = None) -> StreamLog:
    """Make a stream of one token per chunk. Token k has versions[k]. A version's weight_epoch is its order of
    appearance."""
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda log, spans: spans[0].update(start=spans[0]["start"] + 1),  # a gap before the span
        lambda log, spans: log.tokens[2].weight_versions.clear(),
        lambda log, spans: spans.append(dict(spans[0])),  # an overlap
        lambda log, spans: spans[0].update(end=spans[0]["start"]),  # an empty span
    ],
)
def test_a_token_in_no_span_or_in_two_is_an_error(damage: Callable[[StreamLog, list[dict]], object]):
    log = stream("a", "a", "b")
    damage(log, log.tokens[1].weight_versions)
    with pytest.raises(BadSpans):
        version_spans(log)


UPDATED, OLD = ("old", "old", "new", "new"), ("old",) * 4
COMPLETE = "streams go on and complete"
SWITCH = "each token is labelled, and the label switches at one token"
SAME = "up to the switch the tokens are those of the old weights"
AFTER = "a request sent afterwards is made by the new weights alone"


@pytest.mark.parametrize(
    ("live", "after", "failures"),
    [
        (stream(*UPDATED), ["new"], []),
        (stream(*OLD), ["new"], [SWITCH, SAME]),
        (stream("old", "new", "old", "new"), ["new"], [SWITCH, SAME]),
        (stream(*UPDATED, ids=[0, 9, 2, 3]), ["new"], [SAME]),
        (stream("old", "old", "new"), ["new"], [COMPLETE]),
        (stream(*UPDATED), ["old"], [AFTER]),
        (stream(*UPDATED), ["old", "new"], [AFTER]),
    ],
)
def test_an_update_under_a_live_stream(live: StreamLog, after: list[str], failures: list[str]):
    checks = check_update([live], [stream(*OLD)], stream(*after), "new", 4)
    assert [check.promise for check in checks if not check.ok] == failures
