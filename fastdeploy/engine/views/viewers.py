"""What others see of the engine: a gateway that builds its fleet anew, and pages in a browser (GET /ui/events).

The ring of events receives events only while somebody asks for them: the first call attaches it to the log, and it is
detached when no call has come for IDLE_S seconds. Without viewers the engine pays nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from fastdeploy.core.events import Event, EventLog
from fastdeploy.core.request import Request, RequestState
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.parts import EngineParts
from fastdeploy.inter_communicator.messages import EventsArgs, PauseStatusArgs
from fastdeploy.scheduler.queue import Gate
from fastdeploy.scheduler.scheduler import Scheduler

MAX_EVENTS = 2048  # events that are kept for the next call
IDLE_S = 5.0
MAX_REQUESTS = 256  # requests of one reply
MAX_ADAPTERS = 64  # adapters of one reply


def fleet_state(parts: EngineParts) -> dict[str, Any]:
    """Return the reply to messages.FleetStateArgs, from which a gateway builds the state of its fleet anew."""
    scheduler, scopes, adapters = parts.scheduler, parts.scopes, parts.adapters
    pause, gateway_lease = scopes.whole_pause, parts.gateway_lease
    return {
        **gateway_lease.describe(),
        "leader": gateway_lease.leader,
        "gateways": sorted({client.gateway for client in parts.delivery.clients.values() if client.gateway}),
        "last_change": list(gateway_lease.last_change),
        **scopes.whole.weights_label(),
        **parts.switch.committed()._asdict(),
        "phase": pause.phase.value,
        "is_paused": pause.is_paused,
        "rejecting_new_requests": pause.rejecting_new_requests,
        "holds": scopes.describe_holds(),
        **adapters.describe(),
        "past_adapter_epoch": adapters.past_epoch,
        "prepared_loads": adapters.prepared(),
        "asleep": sorted(parts.runner.asleep),
        "session": parts.weights.describe_session(),
        "running": len(scheduler.running) + len(scheduler.frozen),
        "waiting": len(scheduler.waiting),
        "available_gpu_block_num": scheduler.kv.num_free,
        "max_num_seqs": scheduler.max_num_seqs,
    }


def page_state(parts: EngineParts) -> dict[str, Any]:
    """Return the pause status with "kv", "tokens", "session", "asleep" and "adapters", for a page. "counts" are of
    sequences: those in the batch count as frozen while a pause keeps them from running. "progress": output tokens by
    name, of the sequences in the batch."""
    scheduler, adapters, kv = parts.scheduler, parts.adapters, parts.scheduler.kv
    in_batch, frozen = len(scheduler.running), len(scheduler.frozen)
    if scheduler.gate is Gate.CLOSED:
        in_batch, frozen = 0, frozen + in_batch
    status = parts.scopes.status(PauseStatusArgs())
    status["scopes"] = status["scopes"][:MAX_ADAPTERS]
    return status | {
        "counts": {"running": in_batch, "frozen": frozen, "waiting": len(scheduler.waiting)},
        "kv": {
            "used": scheduler.info.num_blocks - kv.num_free,
            "total": scheduler.info.num_blocks,
            "hit_tokens": kv.hit_tokens,
            "queried_tokens": kv.queried_tokens,
        },
        "tokens": parts.metrics.num_tokens,
        "preemptions": scheduler.num_preemptions,
        "session": parts.weights.describe_session(),
        "asleep": sorted(parts.runner.asleep),
        **adapters.describe(MAX_ADAPTERS),
        "num_adapters": adapters.num_known,
        "progress": {r.name: r.num_output_tokens for r in islice(_in_batch(scheduler), MAX_REQUESTS)},
    }


def page_requests(parts: EngineParts) -> list[dict[str, Any]]:
    """Return the requests that are in the engine, for a page: those in the batch, then those that wait, MAX_REQUESTS at
    most. Neither prompts nor outputs are in it."""
    now, scheduler, scopes = time.time(), parts.scheduler, parts.scopes
    known = (request for model in (scopes.base, *scopes.adapters) for request in model.requests)
    waiting = (request for request in known if request.state is RequestState.WAITING)
    return [_describe(r, scheduler, now) for r in islice(chain(_in_batch(scheduler), waiting), MAX_REQUESTS)]


def _in_batch(scheduler: Scheduler) -> Iterator[Request]:
    return chain(scheduler.running, scheduler.frozen)


def _describe(request: Request, scheduler: Scheduler, now: float) -> dict[str, Any]:
    in_batch = request.state is not RequestState.WAITING
    closed = scheduler.gate is Gate.CLOSED or request in scheduler.frozen
    return {
        "name": request.name,
        "request_id": request.group.client_id,
        "session": request.group.add.session,
        "scope": request.scope.id,
        "state": ("frozen" if closed else "running") if in_batch else "waiting",
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "max_tokens": request.max_output_tokens,
        "age_s": round(max(now - request.arrival, 0.0), 3),
    }


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


class Viewers:
    """The answers to API servers that have viewers. parts: of the engine that is shown."""

    def __init__(self, events: EventLog, parts: EngineParts, clock: Callable[[], float]):
        self._events, self._parts, self._clock = events, parts, clock
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
        reply["state"] = page_state(self._parts)
        if args.requests or lost:
            reply["requests"] = page_requests(self._parts)
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
