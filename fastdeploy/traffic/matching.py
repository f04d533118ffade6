"""Which recorded request a new request is."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Set
from typing import NamedTuple

from fastdeploy.traffic.bodies import Asked, FieldDifference, differences, distance, recorded_request
from fastdeploy.traffic.file import Exchange
from fastdeploy.traffic.order import is_control, is_poll

MAX_COMPARED = 200  # recorded requests of a route that are compared with one that has no match


class Expected(NamedTuple):
    """A recorded request. calls_before: control calls that were over when it began."""

    exchange: Exchange
    asked: Asked
    calls_before: int


class Book:
    """The recorded requests, each of which answers one new request. The number of polls does not matter: the answer to
    a poll is that which was recorded after as many control calls."""

    def __init__(self, exchanges: Iterable[Exchange], ignored: Set[str]):
        self._ignored = ignored
        self.all = _expected([exchange for exchange in exchanges if exchange.sent is not None], ignored)
        self._unused: dict[bytes, deque[Expected]] = defaultdict(deque)
        self._polls: dict[bytes, list[Expected]] = defaultdict(list)
        self._of_route: dict[tuple[str, str], list[Expected]] = defaultdict(list)
        self.used: set[int] = set()
        for one in self.all:
            self._of_route[one.asked.route].append(one)
            if is_poll(*one.asked.route):
                self._polls[one.asked.key].append(one)
            else:
                self._unused[one.asked.key].append(one)

    def take(self, asked: Asked, calls_before: int) -> Expected | None:
        """Return the recorded request that is the same. calls_before: control calls that are over in the new run."""
        if polls := self._polls.get(asked.key):
            return self._use(_at_position(polls, calls_before, self.used))
        unused = self._unused.get(asked.key, deque())
        while unused:
            if (one := unused.popleft()).exchange.id not in self.used:
                return self._use(one)
        return None

    def take_next(self, asked: Asked) -> Expected | None:
        """Return the next recorded request of the same route that answered nothing yet, else the last one."""
        of_route = self._of_route.get(asked.route, [])
        free = (one for one in of_route if one.exchange.id not in self.used)
        one = next(free, of_route[-1] if of_route else None)
        return None if one is None else self._use(one)

    def times(self, asked: Asked) -> int:
        """Return how often this request was recorded."""
        return sum(one.asked.key == asked.key for one in self._of_route.get(asked.route, ()))

    def knows_route(self, asked: Asked) -> bool:
        return asked.route in self._of_route

    def nearest(self, asked: Asked) -> tuple[Expected, list[FieldDifference]] | None:
        """Return the recorded request of the same route that differs in the fewest values, and where it differs. Of
        those that answered nothing yet, if there are such."""
        of_route = self._of_route.get(asked.route, [])
        free = [one for one in of_route if one.exchange.id not in self.used] or of_route
        nearest = min(free[:MAX_COMPARED], key=lambda one: distance(one.asked, asked), default=None)
        return None if nearest is None else (nearest, differences(nearest.asked, asked))

    def never_asked(self) -> list[Expected]:
        """Return the recorded requests that answered nothing, except polls."""
        return [one for one in self.all if one.exchange.id not in self.used and not is_poll(*one.asked.route)]

    def _use(self, one: Expected) -> Expected:
        self.used.add(one.exchange.id)
        return one


def _expected(exchanges: list[Exchange], ignored: Set[str]) -> list[Expected]:
    ends = sorted(one.ended for one in exchanges if one.ended is not None and is_control(one.method, one.path))
    found, calls = [], 0
    for exchange in exchanges:
        while calls < len(ends) and ends[calls] <= exchange.began:
            calls += 1
        found.append(Expected(exchange, recorded_request(exchange, ignored), calls))
    return found


def _at_position(same: list[Expected], calls_before: int, used: Set[int]) -> Expected:
    """Return the next one that was recorded after as many control calls; else the last one before, else the first."""
    here = [one for one in same if one.calls_before == calls_before]
    if here:
        return next((one for one in here if one.exchange.id not in used), here[-1])
    return next((one for one in reversed(same) if one.calls_before < calls_before), same[0])
