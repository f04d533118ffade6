"""Requests that wait for a place in the batch, first come first served within a priority."""

from __future__ import annotations

import heapq
from itertools import count

from fastdeploy.core.request import Request, State

Entry = tuple[tuple[int, int], int, int, Request]


class WaitingQueue:
    """Two heaps ordered by ``request.order``: ``started`` (their group has produced a token: preempted ones, or
    siblings of a running choice) and ``fresh``. A pause that drains lets only the started ones in.

    Removal is lazy: an entry counts only while its request waits and belongs to that heap, so that ending 5,000
    waiting requests takes 5,000 cheap removals and no search.
    """

    def __init__(self) -> None:
        self._heaps: dict[bool, list[Entry]] = {False: [], True: []}  # by ``started``
        self._where: dict[Request, bool] = {}  # every waiting request -> the heap it belongs to
        self._tie = count()
        self.num_started = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: Request) -> bool:
        return request in self._where

    def push(self, request: Request) -> None:
        assert request.state is State.WAITING and request not in self._where
        started = request.group.started
        self._where[request] = started
        self.num_started += started
        heapq.heappush(self._heaps[started], (request.order, request.choice, next(self._tie), request))

    def remove(self, request: Request) -> None:
        started = self._where.pop(request)
        self.num_started -= started
        heap = self._heaps[started]
        if len(heap) > 2 * len(self._where) + 64:  # mostly removed entries: keep memory bounded while nobody looks
            heap[:] = [entry for entry in heap if self._where.get(entry[3]) is started]
            heapq.heapify(heap)

    def promote(self, request: Request) -> None:
        """Its group has just produced its first token."""
        self.remove(request)
        self.push(request)

    def head(self, started_only: bool) -> Request | None:
        """The request to admit next, left in place."""
        heads = [h for h in (self._head(True), None if started_only else self._head(False)) if h is not None]
        return min(heads, key=lambda r: (r.order, r.choice), default=None)

    def _head(self, started: bool) -> Request | None:
        heap = self._heaps[started]
        while heap and self._where.get(heap[0][3]) is not started:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def check_integrity(self) -> None:
        assert self.num_started == sum(self._where.values())
        entries = {started: {id(entry[3]) for entry in heap} for started, heap in self._heaps.items()}
        for request, started in self._where.items():
            assert request.state is State.WAITING, request
            assert request.group.started is started, request
            assert id(request) in entries[started], request
