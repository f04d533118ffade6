"""Requests that wait for a place in the batch, by priority and then by arrival; and the choice of the
adapters that are evicted for the adapter of the next one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain, count

from fastdeploy.cache_manager.adapter_memory import AdapterMemory, Place
from fastdeploy.core.request import Request, RequestState, Scope, ServedModel

Entry = tuple[tuple[float, ...], int, int, Request]


class Gate(Enum):
    """The answer to the question which requests of a scope may be scheduled. The scope's pause state sets it."""

    OPEN = "open"
    STARTED_ONLY = "started_only"  # those whose group has produced a token
    CLOSED = "closed"


class _Line:
    """A heap of requests, ordered by ``request.order``. Removal is lazy: a heap entry is valid while its request is in
    ``ready``. A removal needs no search."""

    def __init__(self, started: bool, of_adapters: bool) -> None:
        self.started = started
        self.of_adapters = of_adapters
        self.ready: dict[Request, None] = {}
        self._heap: list[Entry] = []
        self._tie = count()

    def push(self, request: Request) -> None:
        self.ready[request] = None
        heapq.heappush(self._heap, (request.order, request.choice, next(self._tie), request))

    def remove(self, request: Request) -> None:
        del self.ready[request]
        if len(self._heap) > 2 * len(self.ready) + 64:  # most entries are of removed requests: give their memory back
            self._heap = [entry for entry in self._heap if entry[3] in self.ready]
            heapq.heapify(self._heap)

    def head(self) -> Request:
        """Return the first request. The line has one."""
        while self._heap[0][3] not in self.ready:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def check_integrity(self) -> None:
        entries = {id(entry[3]) for entry in self._heap}
        assert all(id(request) in entries for request in self.ready)


class WaitingQueue:
    """The requests that wait, in four lines, each ordered by ``request.order``. Started requests, whose group has
    produced a token (preempted requests, and siblings of a running choice), have lines of their own, because a pause
    that drains admits only these. Requests that need an adapter have lines of their own, because they may have to wait
    for room.

    Two kinds of requests are in no line, so that they do not block others. A request that the gate of its own scope
    does not admit is parked. A request whose adapter is being read is set aside until the adapter is there. The gate of
    the whole engine parks no request.
    """

    def __init__(self) -> None:
        self._lines = [_Line(started, of_adapters) for started in (False, True) for of_adapters in (False, True)]
        self._parked: dict[Request, None] = {}
        self._aside: dict[ServedModel, dict[Request, None]] = {}
        self._gates: dict[Scope, Gate] = {}  # gates that are not open, of scopes other than the whole engine

    def __len__(self) -> int:
        aside = sum(map(len, self._aside.values())) if self._aside else 0
        return sum(len(line.ready) for line in self._lines) + len(self._parked) + aside

    def __contains__(self, request: Request) -> bool:
        return request in self._parked or self._is_aside(request) or any(request in line.ready for line in self._lines)

    def _is_aside(self, request: Request) -> bool:
        return bool(self._aside) and request in self._aside.get(request.model, ())

    def _admitted(self) -> Iterator[Request]:
        """Return all requests that the gates of their own scopes admit."""
        return chain(*(line.ready for line in self._lines), *self._aside.values())

    def num_beside(self, scope: Scope) -> int:
        """Return the number of requests that share the limit of the queue with a new request of ``scope``. Requests
        that are parked share one limit, and the others another, so a closed scope takes no place from the others."""
        parked = len(self._parked)
        return len(self) - parked if self._admits(scope, started=False) else parked

    def gate_of(self, scope: Scope) -> Gate:
        """Return the gate of a scope other than the whole engine."""
        return self._gates.get(scope, Gate.OPEN)

    def set_gate(self, scope: Scope, gate: Gate) -> None:
        """Park the requests of a scope, or make them ready. The time is linear in the number of waiting requests."""
        self._gates[scope] = gate
        if gate is Gate.OPEN:
            del self._gates[scope]
        for request in [r for r in chain(self._admitted(), self._parked) if r.scope is scope]:
            self.remove(request)
            self.push(request)

    def push(self, request: Request) -> None:
        assert request.state is RequestState.WAITING and request not in self
        started = request.group.started
        if self._gates and not self._admits(request.scope, started):
            self._parked[request] = None
            return
        self._lines[2 * started + (request.scope.above is not None)].push(request)

    def _admits(self, scope: Scope, started: bool) -> bool:
        gate = self.gate_of(scope)
        return gate is Gate.OPEN or (gate is Gate.STARTED_ONLY and started)

    def remove(self, request: Request) -> None:
        for line in self._lines:
            if request in line.ready:
                line.remove(request)
                return
        if request in self._parked:
            del self._parked[request]
            return
        aside = self._aside[request.model]
        del aside[request]
        if not aside:
            del self._aside[request.model]

    def set_aside(self, request: Request) -> None:
        """Let a request wait for its adapter, which is being read, without a place in line."""
        self.remove(request)
        self._aside.setdefault(request.model, {})[request] = None

    def take_back(self, model: ServedModel) -> list[Request]:
        """Give the requests of ``model`` that were set aside their places in line again. Return them."""
        requests = list(self._aside.pop(model, ()))
        for request in requests:
            self.push(request)
        return requests

    def promote(self, request: Request) -> None:
        """Move a request, whose group has just produced its first token, to the started requests."""
        self.remove(request)
        self.push(request)

    def head(self, started_only: bool, with_adapters: bool = True) -> Request | None:
        """Return the request to admit next. It stays in the queue. with_adapters: also one that needs an adapter."""
        heads = [
            line.head()
            for line in self._lines
            if line.ready and (line.started or not started_only) and (with_adapters or not line.of_adapters)
        ]
        return min(heads, key=lambda r: (r.order, r.choice), default=None)

    def started_of(self, scope: Scope) -> int:
        """Return the number of started requests that ``scope`` covers and that are not parked."""
        started = sum(len(line.ready) for line in self._lines if line.started)
        if scope.above is None and not self._aside:
            return started
        return sum(scope.covers(request.scope) and request.group.started for request in self._admitted())

    def count(self, scope: Scope) -> tuple[int, int]:
        """Return the number of started and of all requests that ``scope`` covers, with the parked ones."""
        parked = [request for request in self._parked if scope.covers(request.scope)]
        number = len(self) - len(self._parked)
        if scope.above is not None:
            number = sum(request.scope is scope for request in self._admitted())
        return self.started_of(scope) + sum(r.group.started for r in parked), number + len(parked)

    def check_integrity(self) -> None:
        for line in self._lines:
            line.check_integrity()
            for request in line.ready:
                assert request.group.started is line.started, request
                assert (request.scope.above is not None) is line.of_adapters, request
        for model, aside in self._aside.items():
            assert aside and all(request.model is model for request in aside)
        for request in self._admitted():
            assert request.state is RequestState.WAITING, request
            assert self._admits(request.scope, request.group.started), request
        for request in self._parked:
            assert request.state is RequestState.WAITING, request
            assert not self._admits(request.scope, request.group.started), request


class AdapterRoom:
    """The choice of the adapters to evict. An adapter that a request in the batch uses is evicted only if all its users
    are frozen, and those are preempted before."""

    def __init__(self, memory: AdapterMemory, waiting: WaitingQueue):
        self._memory = memory
        self._waiting = waiting

    def victims_for(self, request: Request, any_frozen: bool) -> list[ServedModel] | None:
        """Return the adapters to evict for that of ``request``, or None if they would not make enough room. Those whose
        users are all frozen are the last choice. any_frozen: whether the batch has frozen requests."""
        nbytes = request.model.nbytes
        if nbytes is None or not self._needs_room(request.model):
            return []
        victims = self._memory.victims(nbytes, _is_idle)
        return self._memory.victims(nbytes, self._is_idle_or_frozen) if victims is None and any_frozen else victims

    def read_for(self, request: Request, victims: Iterable[ServedModel]) -> None:
        """Evict ``victims``, which no request uses any more. Set ``request`` aside until its adapter is read."""
        for model in victims:
            self._memory.evict(model)
        if self._needs_room(request.model):
            self._memory.reserve(request.model, request)
        self._waiting.set_aside(request)

    def committed(self, model: ServedModel, keep: bool) -> None:
        """Record that the runner has an adapter under its number. The adapter stays if it is used, or if ``keep`` is
        set and there is room for it. Otherwise it is evicted at once."""

        def may_go(place: Place) -> bool:
            wanted = place.wanted_by is not None and place.wanted_by in self._waiting
            return place.model is not model and _is_idle(place) and not wanted

        self._memory.put(model)
        victims = self._memory.victims(0, may_go)
        for victim in victims or ():
            self._memory.evict(victim)
        if not self._memory.is_used(model) and (victims is None or not keep):
            self._memory.evict(model)
        self._waiting.take_back(model)

    def _needs_room(self, model: ServedModel) -> bool:
        """Whether an adapter must be read, and has no memory for that. Not so while its name is being looked up."""
        return model.nbytes is not None and not self._memory.has(model) and not self._memory.reads(model)

    def _is_idle_or_frozen(self, place: Place) -> bool:
        """Requests are frozen by scope, so an adapter has no other users if one of them is frozen."""
        return _is_idle(place) or self._waiting.gate_of(place.model.scope) is Gate.CLOSED


def _is_idle(place: Place) -> bool:
    return not place.num_users
