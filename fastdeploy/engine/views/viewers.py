"""The events and the state that pages in a browser show (GET /ui/events).

The ring receives events only while somebody asks for them: the first call attaches it to the log, and it is detached
when no call has come for IDLE_S seconds. Without viewers the engine pays nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.events import Event, EventLog
from fastdeploy.core.request import Request, RequestState
from fastdeploy.core.runner import Runner
from fastdeploy.engine.adapters.registry import AdapterRegistry
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.scopes import Scopes
from fastdeploy.engine.updates.weights import WeightSessions
from fastdeploy.inter_communicator.messages import EventsArgs, PauseStatusArgs
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.queue import Gate
from fastdeploy.scheduler.scheduler import Scheduler

MAX_EVENTS = 2048  # kept for the next call
IDLE_S = 5.0
MAX_REQUESTS = 256  # requests of one reply
MAX_ADAPTERS = 64  # adapters of one reply


class EventRing:
    """A sink that keeps the last MAX_EVENTS events. added: number of events so far, also before a detach."""

    wants_steps = False

    def __init__(self) -> None:
        self.added = 0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        self.added += 1
        self._events.append(event)

    def clear(self) -> None:
        self._events.clear()

    def after(self, number: int) -> tuple[list[Event], int]:
        """Return the events after the first ``number`` ones, and how many of these the ring has lost."""
        wanted = max(self.added - number, 0)
        kept = min(wanted, len(self._events))
        return list(islice(self._events, len(self._events) - kept, None)), wanted - kept


class StateReader:
    """Reads what a page shows of the engine's state, on the loop's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        metrics: EngineMetrics,
        scopes: Scopes,
        weights: WeightSessions,
        adapters: AdapterRegistry,
        runner: Runner,
    ):
        self._scheduler, self._kv, self._metrics, self._scopes = scheduler, kv, metrics, scopes
        self._weights, self._adapters, self._runner = weights, adapters, runner

    def state(self) -> dict[str, Any]:
        """Return the pause status with "kv", "tokens", "session", "asleep" and "adapters". "counts" are of sequences:
        those in the batch count as frozen while a pause keeps them from running. "progress": output tokens by name, of
        the sequences in the batch."""
        scheduler = self._scheduler
        in_batch, frozen = len(scheduler.running), len(scheduler.frozen)
        if scheduler.gate is Gate.CLOSED:
            in_batch, frozen = 0, frozen + in_batch
        status = self._scopes.status(PauseStatusArgs())
        status["scopes"] = status["scopes"][:MAX_ADAPTERS]
        return status | {
            "counts": {"running": in_batch, "frozen": frozen, "waiting": len(scheduler.waiting)},
            "kv": {
                "used": scheduler.info.num_blocks - self._kv.num_free,
                "total": scheduler.info.num_blocks,
                "hit_tokens": self._kv.hit_tokens,
                "queried_tokens": self._kv.queried_tokens,
            },
            "tokens": self._metrics.num_tokens,
            "preemptions": scheduler.num_preemptions,
            "session": self._weights.describe_session(),
            "asleep": sorted(self._runner.asleep),
            **self._adapters.describe(MAX_ADAPTERS),
            "num_adapters": self._adapters.num_known,
            "progress": {r.name: r.num_output_tokens for r in self._in_batch(MAX_REQUESTS)},
        }

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that are in the engine: those in the batch, then those that wait, MAX_REQUESTS at most.
        Neither prompts nor outputs are in it."""
        now = time.time()
        return [self._describe(request, now) for request in islice(self._live(), MAX_REQUESTS)]

    def _live(self) -> Iterator[Request]:
        yield from self._in_batch(None)
        yield from (
            r
            for model in (self._scopes.base, *self._scopes.adapters)
            for r in model.requests
            if r.state is RequestState.WAITING
        )

    def _in_batch(self, limit: int | None) -> Iterator[Request]:
        return islice(chain(self._scheduler.running, self._scheduler.frozen), limit)

    def _describe(self, request: Request, now: float) -> dict[str, Any]:
        in_batch = request.state is not RequestState.WAITING
        closed = self._scheduler.gate is Gate.CLOSED or request in self._scheduler.frozen
        return {
            "name": request.name,
            "request_id": request.group.client_id,
            "scope": request.scope.id,
            "state": ("frozen" if closed else "running") if in_batch else "waiting",
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "max_tokens": request.max_output_tokens,
            "age_s": round(max(now - request.arrival, 0.0), 3),
        }


class Viewers:
    """Answers the calls of API servers that have viewers."""

    def __init__(self, events: EventLog, reader: StateReader, clock: Callable[[], float]):
        self._events, self._reader, self._clock = events, reader, clock
        self._ring = EventRing()
        self._due: float | None = None  # time of the detach; None = not attached

    @handles(EventsArgs)
    def read(self, args: EventsArgs) -> dict[str, Any]:
        """Answer one call, see messages.EventsArgs. The first call attaches the ring."""
        if self._due is None:
            self._events.attach(self._ring)
        now = self._clock()
        self._due = now + IDLE_S
        events, lost = self._ring.after(args.after)
        reply: dict[str, Any] = {"now": now, "next": self._ring.added, "events": events, "lost": lost}
        reply["state"] = self._reader.state()
        if args.requests or lost:
            reply["requests"] = self._reader.requests()
        return reply

    def poll(self) -> None:
        """Detach the ring if nobody has asked for IDLE_S seconds."""
        if self._due is not None and self._clock() >= self._due:
            self._events.detach(self._ring)
            self._ring.clear()
            self._due = None

    def next_deadline(self) -> float | None:
        """Time at which ``poll`` must be called even if no message comes."""
        return self._due
