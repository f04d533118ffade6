"""Requests that must end at a time: at their deadline, or after max_queue_s without a first step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from fastdeploy.core.outputs import DEADLINE, QUEUE_TIMEOUT
from fastdeploy.core.request import Group, Request

MIN_PRUNE = 1024
WHY = {DEADLINE: "its deadline has passed", QUEUE_TIMEOUT: "it waited for its first step for longer than max_queue_s"}


class Deadlines:
    """A heap of deadlines. Costs no time per step while no deadline is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Group]] = []
        self._numbers = count()
        self._prune_at = MIN_PRUNE

    def add(self, group: Group, now: float, wall: float) -> None:
        """Add the deadlines of a group. now: on the loop's clock. wall: time.time() at the same moment."""
        add = group.add
        if add.deadline_s is not None:
            self._push(now + (add.arrival or wall) + add.deadline_s - wall, DEADLINE, group)
        if add.max_queue_s is not None:
            self._push(now + add.max_queue_s, QUEUE_TIMEOUT, group)

    def next(self) -> float | None:
        """Return the time of the first deadline. Its request may have ended already."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Yield the requests that must end now, each with DEADLINE or QUEUE_TIMEOUT."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, group = heapq.heappop(self._heap)
            for request in list(group.requests):
                if request.live and (kind is DEADLINE or not group.scheduled):
                    yield request, kind

    def _push(self, at: float, kind: str, group: Group) -> None:
        if len(self._heap) >= self._prune_at:  # drop the deadlines of requests that have ended
            self._heap = [entry for entry in self._heap if entry[3].requests]
            heapq.heapify(self._heap)
            self._prune_at = max(MIN_PRUNE, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, next(self._numbers), kind, group))
