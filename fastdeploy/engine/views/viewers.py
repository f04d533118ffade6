"""The events that pages in a browser show (GET /ui/events).

The ring receives events only while somebody asks for them: the first call attaches it to the log, and it is detached
when no call has come for IDLE_S seconds. Without viewers the engine pays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from fastdeploy.core.events import Event, EventLog
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.parts import EngineParts
from fastdeploy.engine.views.state import page_requests, page_state
from fastdeploy.inter_communicator.messages import EventsArgs

MAX_EVENTS = 2048  # kept for the next call
IDLE_S = 5.0


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
    """Answers the calls of API servers that have viewers. parts: of the engine that is shown."""

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
