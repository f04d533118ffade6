"""What came before what: control calls and the requests around them, in the recording and in the new run."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HEARTBEATS = ("/v1/renew",)
_CONTROL = re.compile(
    r"pause|resume|continue|weight|sleep|wake|lora|reset|flush|abort|memory_occupation|collective_rpc|version"
)


def is_control(method: str, path: str) -> bool:
    """Return whether a call changes the engine's state, and not only asks it for an answer: pauses, weights, adapters,
    sleep and caches, in the routes of vLLM, SGLang and ours."""
    return not is_poll(method, path) and _CONTROL.search(path) is not None


def is_poll(method: str, path: str) -> bool:
    """Return whether a request changes nothing, so that clients send it as often as time permits."""
    return method in _SAFE_METHODS or path in _HEARTBEATS


class Span(NamedTuple):
    """When a request began and ended, in the recording and in the new run. name: for messages."""

    name: str
    control: bool
    recorded: tuple[float, float]
    now: tuple[float, float]


class Flip(NamedTuple):
    """A request that came on the other side of a control call. after: in the new run."""

    request: Span
    call: Span
    after: bool

    def __str__(self) -> str:
        new, old = ("after", "before") if self.after else ("before", "after")
        return f"{self.request.name} came {new} {self.call.name}; {old} it in the recording"


def flips(spans: Sequence[Span]) -> list[Flip]:
    """Return the requests that were over before a control call began in one run, and began after its end in the other.
    For each request, one call. Requests that ran during the call in one of the runs may be on any side in the other."""
    calls = [span for span in spans if span.control]
    by_end = sorted(calls, key=lambda call: call.recorded[1])
    by_begin = sorted(calls, key=lambda call: call.recorded[0])
    ends = [call.recorded[1] for call in by_end]
    begins = [call.recorded[0] for call in by_begin]
    # Of the calls up to each one, that which begins last in the new run; of those from each one on, the first to end.
    latest = list(accumulate(by_end, _begins_later))
    earliest = list(accumulate(by_begin[::-1], _ends_earlier))[::-1]
    found = []
    for span in spans:
        ended_before = bisect_left(ends, span.recorded[0])
        began_after = bisect_right(begins, span.recorded[1])
        if ended_before and (call := latest[ended_before - 1]).now[0] > span.now[1]:
            found.append(Flip(span, call, after=False))
        elif began_after < len(calls) and (call := earliest[began_after]).now[1] < span.now[0] and not span.control:
            found.append(Flip(span, call, after=True))
    return found


def _begins_later(a: Span, b: Span) -> Span:
    return a if a.now[0] >= b.now[0] else b


def _ends_earlier(a: Span, b: Span) -> Span:
    return a if a.now[1] <= b.now[1] else b
