"""Events: what happens in the engine, for those who look (a trace file, a page in a browser).

While nobody looks, an event costs one look-up of ``EventLog.watched``. So call sites ask it first:

    if events.watched:
        events.add(EventKind.ADMITTED, request.name, cached_tokens=n)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import msgspec


class EventKind(StrEnum):
    """The kinds of events, with the fields of each beyond ``name``.

    Of a request (one choice; ``name`` is "request id/choice"):
        QUEUED     accepted. scope, request_id (that the client knows), session, prompt_tokens, max_tokens
        ADMITTED   in the batch. cached_tokens, computed_before (output tokens that it has from before a preemption)
        FROZEN     the scope of its adapter was closed while it ran. A pause of the whole engine freezes no request: the
                   requests stay where they are, and PHASE says that the gate is closed
        THAWED     the scope of its adapter was opened again
        PREEMPTED  its KV was given up. why (memory | pause | cleared | recompute), computed (tokens whose KV it had)
        FINAL      ended. reason, output_tokens, spans ([version, weight_epoch, adapter_epoch, start, end])
    Of a pause (``name`` is the scope):
        PHASE      phase (running | draining | paused), gate (open | started_only | closed)
        HELD       a hold was placed, renewed or made stronger. hold_id, mode, placed_by
        RELEASED   a hold ended. hold_id, why (resume | ttl | cancel)
    Of weights (``name`` is the session's id, or the scope for COMMITTED):
        SESSION    state (open | committing | prepared | ready | ended), event (begin | part | commit | checked |
                   prepare | swap | end), version, nbytes (received)
        COMMITTED  new weights serve. version, weight_epoch, adapter_epoch, kv
    Of the loop (``name`` is ""), only for a sink with ``wants_steps``:
        STEP       one step has ended. seconds, plan (StepPlan), requests (of each chunk), sampled (list of NewTokens,
                   or None if the step was given up), free_blocks (of the KV cache). The objects are those of the
                   loop: a sink reads only what never changes
    """

    QUEUED = "queued"
    ADMITTED = "admitted"
    FROZEN = "frozen"
    THAWED = "thawed"
    PREEMPTED = "preempted"
    FINAL = "final"
    PHASE = "phase"
    HELD = "held"
    RELEASED = "released"
    SESSION = "session"
    COMMITTED = "committed"
    STEP = "step"


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One event. at: seconds on the monotonic clock of this machine, which all processes share."""

    at: float
    kind: EventKind
    name: str
    fields: dict[str, Any]


class Sink(Protocol):
    """A receiver of events. Runs on the loop's thread, so ``add`` must neither block nor raise.

    wants_steps: whether it gets STEP too, which comes at every step."""

    wants_steps: bool

    def add(self, event: Event) -> None: ...


class EventLog:
    """The log of events: it gives each event to every attached sink. watched: some sink is attached. watched_steps:
    some attached sink wants STEP."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.watched = False
        self.watched_steps = False
        self._clock = clock
        self._sinks: list[Sink] = []

    def attach(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self._count()

    def detach(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        self._count()

    def add(self, kind: EventKind, name: str, **fields: Any) -> None:
        event = Event(self._clock(), kind, name, fields)
        for_all = kind is not EventKind.STEP
        for sink in self._sinks:
            if for_all or sink.wants_steps:
                sink.add(event)

    def _count(self) -> None:
        self.watched = bool(self._sinks)
        self.watched_steps = any(sink.wants_steps for sink in self._sinks)
