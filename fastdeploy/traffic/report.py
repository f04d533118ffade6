"""What is different in a new run from the recorded one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.traffic.bodies import Asked, FieldDifference
from fastdeploy.traffic.file import Exchange, Outcome
from fastdeploy.traffic.matching import Book, Expected
from fastdeploy.traffic.order import Span, flips, is_control

MAX_FIELDS = 10  # of one request that are shown


class Kind(enum.Enum):
    """The kinds of differences."""

    UNKNOWN_ROUTE = "unknown_route"
    BODY = "body"
    ASKED_MORE_OFTEN = "asked_more_often"
    NEVER_ASKED = "never_asked"
    ORDER = "order"
    CLIENT_LEFT = "client_left"
    CLIENT_STAYED = "client_stayed"
    NOT_KEPT = "not_kept"


@dataclass
class Difference:
    """One difference. fields: those in which a body differs."""

    kind: Kind
    text: str
    fields: Sequence[FieldDifference] = ()

    def as_json(self) -> dict[str, Any]:
        fields = [field._asdict() for field in self.fields[:MAX_FIELDS]]
        return {"kind": self.kind.value, "text": self.text} | ({"fields": fields} if fields else {})

    def lines(self) -> Iterator[str]:
        yield f"{self.kind.value}: {self.text}"
        for field in self.fields[:MAX_FIELDS]:
            yield f"    {field}"
        if len(self.fields) > MAX_FIELDS:
            yield f"    and {len(self.fields) - MAX_FIELDS} fields more"


@dataclass
class Answered:
    """A request of the new run. expected: the recorded request that answers it, None without one. nearest: that which
    it is like, if it is not the same. ended: None while it runs."""

    asked: Asked
    began: float
    expected: Expected | None
    difference: Difference | None = None
    nearest: Expected | None = None
    ended: float | None = None
    client_left: bool = False
    client_stayed: bool = False

    @property
    def name(self) -> str:
        return f"{self.asked.method} {self.asked.path}"


@dataclass
class Report:
    """A comparison of two runs. matched: requests of the new run that are the same as a recorded one."""

    requests: int
    matched: int
    recorded: int
    differences: list[Difference]

    @property
    def same(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        counts = {"requests": self.requests, "matched": self.matched, "recorded": self.recorded}
        return {"same": self.same, **counts, "differences": [one.as_json() for one in self.differences]}

    def text(self) -> str:
        head = f"{self.requests} requests, {self.matched} the same as in the recording, which has {self.recorded}"
        verdict = "No difference." if self.same else f"{len(self.differences)} differences:"
        return "\n".join([head, verdict, *(line for one in self.differences for line in one.lines())])


def compare(book: Book, answered: Sequence[Answered]) -> Report:
    """Return the report of a new run, which may still go on."""
    found = [one.difference for one in answered if one.difference is not None]
    alike = {one.nearest.exchange.id for one in answered if one.nearest is not None}
    for one in answered:
        if one.expected is not None:
            found += _ending(one, one.expected.exchange)
    for expected in book.never_asked():
        if expected.exchange.id not in alike:
            found.append(Difference(Kind.NEVER_ASKED, expected.exchange.name))
    found += [Difference(Kind.ORDER, str(flip)) for flip in flips(list(_spans(answered)))]
    matched = sum(one.expected is not None and one.difference is None for one in answered)
    return Report(len(answered), matched, len(book.all), found)


def _ending(one: Answered, exchange: Exchange) -> Iterator[Difference]:
    if one.client_left and exchange.outcome is not Outcome.CLIENT_LEFT:
        text = f"{exchange.name}: the client left before the end of the reply; it did not in the recording"
        yield Difference(Kind.CLIENT_LEFT, text)
    if one.client_stayed:
        text = f"{exchange.name}: the client left in the recording, and waited now"
        yield Difference(Kind.CLIENT_STAYED, text)


def _spans(answered: Sequence[Answered]) -> Iterator[Span]:
    """Yield when each request was there. One that was asked more often than recorded has no time in the recording."""
    seen = set[int]()
    for one in answered:
        if one.expected is None or one.expected.exchange.id in seen:
            continue
        exchange = one.expected.exchange
        seen.add(exchange.id)
        forever = float("inf")
        recorded = (exchange.began, forever if exchange.ended is None else exchange.ended)
        now = (one.began, forever if one.ended is None else one.ended)
        yield Span(exchange.name, is_control(exchange.method, exchange.path), recorded, now)
