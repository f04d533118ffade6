"""Requests that wait for a place in the batch, first come first served within a priority."""

from __future__ import annotations

import heapq
from enum import Enum
from itertools import count

from fastdeploy.core.request import Request, RequestState
from fastdeploy.core.scope import Scope

Entry = tuple[tuple[int, int], int, int, Request]


class Gate(Enum):
    """Which requests of a scope may be scheduled; set by the scope's pause state."""

    OPEN = "open"
    STARTED_ONLY = "started_only"  # those whose group has produced a token
    CLOSED = "closed"


class WaitingQueue:
    """Two heaps ordered by ``request.order``: ``started`` (their group has produced a token: preempted ones, or
    siblings of a running choice) and ``fresh``. A pause that drains lets only the started ones in.

    A request that the gate of its own scope does not let in is parked, in neither heap: a closed scope is never in the
    way of the others. The gate of the whole engine parks nobody, since it concerns all alike.

    Removal is lazy: an entry counts only while its request is ready in that heap, so that ending 5,000 waiting requests
    takes 5,000 cheap removals and no search.
    """

    def __init__(self) -> None:
        self._heaps: dict[bool, list[Entry]] = {False: [], True: []}  # by ``started``
        self._ready: dict[bool, dict[Request, None]] = {False: {}, True: {}}  # what counts in each heap
        self._parked: dict[Request, None] = {}
        self._gates: dict[Scope, Gate] = {}  # of the scopes whose gate is not open, without the whole engine's
        self._tie = count()

    def __len__(self) -> int:
        return self.num_ready + len(self._parked)

    def __contains__(self, request: Request) -> bool:
        return request in self._ready[False] or request in self._ready[True] or request in self._parked

    @property
    def num_ready(self) -> int:
        """Requests that the gates of their scopes let in."""
        return len(self._ready[False]) + len(self._ready[True])

    @property
    def num_started(self) -> int:
        """Those of them whose group has produced a token."""
        return len(self._ready[True])

    def gate_of(self, scope: Scope) -> Gate:
        """The gate of a scope other than the whole engine."""
        return self._gates.get(scope, Gate.OPEN)

    def set_gate(self, scope: Scope, gate: Gate) -> None:
        """Park the requests of a scope, or make them ready. Takes time in proportion to all that wait."""
        self._gates[scope] = gate
        if gate is Gate.OPEN:
            del self._gates[scope]
        for request in [r for part in (*self._ready.values(), self._parked) for r in part if r.scope is scope]:
            self.remove(request)
            self.push(request)

    def push(self, request: Request) -> None:
        assert request.state is RequestState.WAITING and request not in self
        started = request.group.started
        if self._gates and not self._lets_in(request.scope, started):
            self._parked[request] = None
            return
        self._ready[started][request] = None
        heapq.heappush(self._heaps[started], (request.order, request.choice, next(self._tie), request))

    def _lets_in(self, scope: Scope, started: bool) -> bool:
        gate = self.gate_of(scope)
        return gate is Gate.OPEN or (gate is Gate.STARTED_ONLY and started)

    def remove(self, request: Request) -> None:
        if request in self._parked:
            del self._parked[request]
            return
        started = request in self._ready[True]
        ready, heap = self._ready[started], self._heaps[started]
        del ready[request]
        if len(heap) > 2 * self.num_ready + 64:  # mostly removed entries: keep memory bounded while nobody looks
            heap[:] = [entry for entry in heap if entry[3] in ready]
            heapq.heapify(heap)

    def promote(self, request: Request) -> None:
        """Move a request whose group has just produced its first token."""
        self.remove(request)
        self.push(request)

    def head(self, started_only: bool) -> Request | None:
        """The request to admit next, left in place."""
        heads = [h for h in (self._head(True), None if started_only else self._head(False)) if h is not None]
        return min(heads, key=lambda r: (r.order, r.choice), default=None)

    def _head(self, started: bool) -> Request | None:
        heap, ready = self._heaps[started], self._ready[started]
        while heap and heap[0][3] not in ready:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def started_of(self, scope: Scope) -> int:
        """How many started requests that ``scope`` covers are ready."""
        if scope.above is None:
            return self.num_started
        return sum(request.scope is scope for request in self._ready[True])

    def count(self, scope: Scope) -> tuple[int, int]:
        """How many that ``scope`` covers wait with a token produced, and how many wait in all; the parked ones too."""
        parked = [request for request in self._parked if scope.covers(request.scope)]
        ready = self.num_ready
        if scope.above is not None:
            ready = sum(request.scope is scope for part in self._ready.values() for request in part)
        return self.started_of(scope) + sum(r.group.started for r in parked), ready + len(parked)

    def check_integrity(self) -> None:
        for started, ready in self._ready.items():
            entries = {id(entry[3]) for entry in self._heaps[started]}
            for request in ready:
                assert request.state is RequestState.WAITING and request.group.started is started, request
                assert self._lets_in(request.scope, started) and id(request) in entries, request
        for request in self._parked:
            assert request.state is RequestState.WAITING, request
            assert not self._lets_in(request.scope, request.group.started), request
