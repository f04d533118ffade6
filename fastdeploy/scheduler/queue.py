"""Requests that wait for a place in the batch, by priority and then by arrival."""

from __future__ import annotations

import heapq
from enum import Enum
from itertools import count

from fastdeploy.core.request import Request, RequestState
from fastdeploy.core.scope import Scope

Entry = tuple[tuple[int, int], int, int, Request]


class Gate(Enum):
    """Requests of a scope that may be scheduled. The scope's pause state sets the gate."""

    OPEN = "open"
    STARTED_ONLY = "started_only"  # those whose group has produced a token
    CLOSED = "closed"


class WaitingQueue:
    """Two heaps ordered by ``request.order``: one of started requests, whose group has produced a token (preempted
    requests, and siblings of a running choice), and one of the others. A pause that drains admits only started ones.

    A request that the gate of its own scope does not admit is parked, outside of both heaps, so a closed scope does not
    block the others. The gate of the whole engine parks no request.

    Removal is lazy: a heap entry is valid while its request is ready in that heap. A removal needs no search.
    """

    def __init__(self) -> None:
        self._heaps: dict[bool, list[Entry]] = {False: [], True: []}  # by ``group.started``
        self._ready: dict[bool, dict[Request, None]] = {False: {}, True: {}}  # requests with a valid entry in each heap
        self._parked: dict[Request, None] = {}
        self._gates: dict[Scope, Gate] = {}  # gates that are not open, of scopes other than the whole engine
        self._tie = count()

    def __len__(self) -> int:
        return self.num_ready + len(self._parked)

    def __contains__(self, request: Request) -> bool:
        return request in self._ready[False] or request in self._ready[True] or request in self._parked

    @property
    def num_ready(self) -> int:
        """Number of requests that the gates of their own scopes admit."""
        return len(self._ready[False]) + len(self._ready[True])

    @property
    def num_started(self) -> int:
        """Number of ready requests whose group has produced a token."""
        return len(self._ready[True])

    def num_beside(self, scope: Scope) -> int:
        """Return the number of requests that share the limit of the queue with a new request of ``scope``. Requests
        that are parked share one limit, and the others another, so a closed scope takes no place from the others."""
        return self.num_ready if self._admits(scope, started=False) else len(self._parked)

    def gate_of(self, scope: Scope) -> Gate:
        """Return the gate of a scope other than the whole engine."""
        return self._gates.get(scope, Gate.OPEN)

    def set_gate(self, scope: Scope, gate: Gate) -> None:
        """Park the requests of a scope, or make them ready. The time is linear in the number of waiting requests."""
        self._gates[scope] = gate
        if gate is Gate.OPEN:
            del self._gates[scope]
        for request in [r for part in (*self._ready.values(), self._parked) for r in part if r.scope is scope]:
            self.remove(request)
            self.push(request)

    def push(self, request: Request) -> None:
        assert request.state is RequestState.WAITING and request not in self
        started = request.group.started
        if self._gates and not self._admits(request.scope, started):
            self._parked[request] = None
            return
        self._ready[started][request] = None
        heapq.heappush(self._heaps[started], (request.order, request.choice, next(self._tie), request))

    def _admits(self, scope: Scope, started: bool) -> bool:
        gate = self.gate_of(scope)
        return gate is Gate.OPEN or (gate is Gate.STARTED_ONLY and started)

    def remove(self, request: Request) -> None:
        if request in self._parked:
            del self._parked[request]
            return
        started = request in self._ready[True]
        ready, heap = self._ready[started], self._heaps[started]
        del ready[request]
        if len(heap) > 2 * self.num_ready + 64:  # most entries are of removed requests: give their memory back
            heap[:] = [entry for entry in heap if entry[3] in ready]
            heapq.heapify(heap)

    def promote(self, request: Request) -> None:
        """Move a request, whose group has just produced its first token, to the started requests."""
        self.remove(request)
        self.push(request)

    def head(self, started_only: bool) -> Request | None:
        """Return the request to admit next. It stays in the queue."""
        heads = [h for h in (self._head(True), None if started_only else self._head(False)) if h is not None]
        return min(heads, key=lambda r: (r.order, r.choice), default=None)

    def _head(self, started: bool) -> Request | None:
        heap, ready = self._heaps[started], self._ready[started]
        while heap and heap[0][3] not in ready:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def started_of(self, scope: Scope) -> int:
        """Return the number of started requests that ``scope`` covers and that are ready."""
        if scope.above is None:
            return self.num_started
        return sum(request.scope is scope for request in self._ready[True])

    def count(self, scope: Scope) -> tuple[int, int]:
        """Return the number of started and of all requests that ``scope`` covers, with the parked ones."""
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
                assert self._admits(request.scope, started) and id(request) in entries, request
        for request in self._parked:
            assert request.state is RequestState.WAITING, request
            assert not self._admits(request.scope, request.group.started), request
