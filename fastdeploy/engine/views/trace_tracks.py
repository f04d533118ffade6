"""Turns the engine's events into Chrome trace events, which Perfetto and chrome://tracing show.

The tracks of one engine process:

    steps                 a slice for each step; commits of weights as marks
    requests, lane 1 ...  a request takes the first free lane while it is in the batch, so there are not more lanes than
                          the batch and the frozen requests need. Inside: chunks of the prompt, tokens by weight
                          version, "frozen"
    waiting               one slice for each request that waits (async events)
    pauses, hold          phases of each scope, and each hold
    weight sessions       from begin to end
    counters              requests, KV blocks, tokens per second

Perfetto makes a track for each name of an async event. So the names are few, and the args say which request or hold.

Source of the format: "Trace Event Format" (Chromium project): B and E nest within a thread, b and e match by category
and id, s and f are a flow, C is a counter, M is metadata, ts and dur are microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.events import Event, EventKind

TraceEvent = dict[str, Any]
STEPS_TID, FIRST_LANE_TID = 1, 10
COUNT_EVERY_S = 0.1  # between two values of a counter


@dataclass
class Lane:
    """A request in the batch, and what its lane shows. tokens: of the open slice of one weight version."""

    tid: int
    version: str | None = None
    tokens: int = 0
    frozen: bool = False


class Tracks:
    """The state that the trace shows. ``feed`` returns the trace events of one event. All begun slices are ended, also
    if events are missing."""

    def __init__(self, pid: int, boot_id: str, num_blocks: int):
        self._pid = pid
        self._num_blocks = num_blocks
        self._out: list[TraceEvent] = []
        self._lanes: dict[str, Lane] = {}
        self._free: list[int] = []
        self._num_lanes = 0
        self._spans: dict[tuple[str, str], str] = {}  # open async slices: name by (category, id)
        self._flows: dict[str, int] = {}  # requests that were preempted: number of the flow to their next admission
        self._num_flows = 0
        self._num_waiting = 0
        self._tokens = 0
        self._counted_at = 0.0
        self._last_us = 0
        self._begun = False
        self._feed: dict[EventKind, Callable[[Event], None]] = {
            EventKind.QUEUED: self._wait,
            EventKind.ADMITTED: self._admitted,
            EventKind.FROZEN: self._frozen,
            EventKind.THAWED: self._thawed,
            EventKind.PREEMPTED: self._preempted,
            EventKind.FINAL: self._final,
            EventKind.PHASE: self._phase,
            EventKind.HELD: self._held,
            EventKind.RELEASED: self._released,
            EventKind.SESSION: self._session,
            EventKind.COMMITTED: self._committed,
            EventKind.STEP: self._step,
        }
        self._name("process_name", 0, f"fastdeploy engine {pid}")
        self._put("M", "process_labels", 0, 0, args={"labels": f"boot {boot_id}"})
        self._name("thread_name", STEPS_TID, "steps")

    def begin(self, first: Event, wall_time: str) -> list[TraceEvent]:
        """Return the mark of the beginning, at the time of the first event. The clock may have run for days, and a
        mark at 0 would make viewers show all that time. Later calls return nothing."""
        if self._begun:
            return []
        self._begun = True
        self._last_us = _us(first.at - first.fields.get("seconds", 0.0))
        return self.mark("trace begins", wall_time=wall_time)

    def feed(self, event: Event) -> list[TraceEvent]:
        self._last_us = _us(event.at)
        self._feed[event.kind](event)
        return self.drain()

    def drain(self) -> list[TraceEvent]:
        """Return the trace events since the last call."""
        out, self._out = self._out, []
        return out

    def mark(self, name: str, **args: Any) -> list[TraceEvent]:
        """Return a mark across all tracks, at the time of the last event."""
        self._put("i", name, self._last_us, STEPS_TID, s="g", args=args)
        return self.drain()

    def end(self) -> list[TraceEvent]:
        """Return the ends of all open slices, at the time of the last event."""
        for lane in self._lanes.values():
            self._leave(lane, self._last_us, {"why": "the trace ends"})
        for cat, of in list(self._spans):
            self._close(cat, of, self._last_us)
        return self.drain()

    # ------------------------------------------------------------------ requests

    def _admitted(self, event: Event) -> None:
        at = _us(event.at)
        self._close("waiting", event.name, at)
        if (lost := self._lanes.pop(event.name, None)) is not None:  # the end of its lane is missing
            self._leave(lost, at, {})
        lane = self._lanes[event.name] = Lane(self._next_tid())
        self._put("B", event.name, at, lane.tid, args=event.fields)
        if (flow := self._flows.pop(event.name, None)) is not None:
            self._put("f", "preempted", at, lane.tid, cat="preempted", id=flow, bp="e")

    def _next_tid(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        tid = FIRST_LANE_TID + self._num_lanes
        self._num_lanes += 1
        self._name("thread_name", tid, f"requests, lane {self._num_lanes}")
        self._put("M", "thread_sort_index", 0, tid, args={"sort_index": tid})
        return tid

    def _frozen(self, event: Event) -> None:
        if (lane := self._lanes.get(event.name)) is not None and not lane.frozen:
            self._end_tokens(lane, _us(event.at))
            lane.frozen = True
            self._put("B", "frozen", _us(event.at), lane.tid)

    def _thawed(self, event: Event) -> None:
        if (lane := self._lanes.get(event.name)) is not None:
            self._thaw(lane, _us(event.at))

    def _thaw(self, lane: Lane, at: int) -> None:
        if lane.frozen:
            lane.frozen = False
            self._put("E", "frozen", at, lane.tid)

    def _preempted(self, event: Event) -> None:
        if (lane := self._lanes.pop(event.name, None)) is None:
            return
        at = _us(event.at)
        self._num_flows += 1
        self._flows[event.name] = self._num_flows
        self._put("s", "preempted", at, lane.tid, cat="preempted", id=self._num_flows)
        self._leave(lane, at, event.fields)
        self._wait(event)

    def _wait(self, event: Event) -> None:
        self._open("waiting", event.name, "waiting", _us(event.at), {"request": event.name, **event.fields})

    def _final(self, event: Event) -> None:
        at = _us(event.at)
        self._close("waiting", event.name, at, event.fields)
        self._flows.pop(event.name, None)
        if (lane := self._lanes.pop(event.name, None)) is not None:
            self._leave(lane, at, event.fields)
        if not self._lanes and not self._num_waiting:
            self._count(event.at, self._num_blocks)

    def _leave(self, lane: Lane, at: int, args: dict[str, Any]) -> None:
        self._end_tokens(lane, at)
        self._thaw(lane, at)
        self._put("E", "", at, lane.tid, args=args)
        heapq.heappush(self._free, lane.tid)

    def _end_tokens(self, lane: Lane, at: int) -> None:
        if lane.version is not None:
            self._put("E", "", at, lane.tid, args={"tokens": lane.tokens})
            lane.version, lane.tokens = None, 0

    # ------------------------------------------------------------------ steps

    def _step(self, event: Event) -> None:
        plan, requests, sampled = event.fields["plan"], event.fields["requests"], event.fields["sampled"]
        end, began = _us(event.at), _us(event.at - event.fields["seconds"])
        prompts = {}
        for request, chunk in zip(requests, plan.chunks, strict=True):
            if chunk.num_known > 1:
                prompts[request.name] = chunk.num_known
        name = "step" if sampled is not None else "step, given up for a pause"
        tokens = sum(len(new.token_ids) for new in sampled or ())
        args = {"step": plan.step_id, "sequences": len(requests), "prompt_tokens": sum(prompts.values())}
        args["drafts"] = sum(chunk.drafted for chunk in plan.chunks)
        self._complete(name, began, end, STEPS_TID, {**args, "tokens": tokens})
        for of, count in prompts.items():
            if (lane := self._lanes.get(of)) is not None:
                self._end_tokens(lane, began)
                self._complete(f"{count} prompt tokens", began, end, lane.tid, {"given_up": sampled is None})
        for new in sampled or ():
            name, count = new.request.name, len(new.token_ids)
            self._count_tokens(name, count, new.served.version, name in prompts, began, end)
        self._tokens += tokens
        if event.at - self._counted_at >= COUNT_EVERY_S:
            self._count(event.at, event.fields["free_blocks"])

    def _count_tokens(self, name: str, count: int, version: str, after_prompt: bool, began: int, end: int) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            return
        if lane.version != version:
            start = end if after_prompt else began
            self._end_tokens(lane, start)
            lane.version = version
            self._put("B", f"version {version}", start, lane.tid)
        lane.tokens += count

    def _count(self, now: float, free_blocks: int) -> None:
        at, seconds = _us(now), now - self._counted_at if self._counted_at else 0.0
        frozen = sum(lane.frozen for lane in self._lanes.values())
        running = len(self._lanes) - frozen
        counts = {"running": running, "waiting": self._num_waiting, "frozen": frozen}
        self._put("C", "requests", at, 0, args=counts)
        self._put("C", "KV blocks", at, 0, args={"in use": self._num_blocks - free_blocks})
        self._put("C", "tokens per second", at, 0, args={"tokens": round(self._tokens / seconds, 1) if seconds else 0})
        self._tokens, self._counted_at = 0, now

    # ------------------------------------------------------------------ pauses and weights

    def _phase(self, event: Event) -> None:
        at, phase, scope = _us(event.at), event.fields["phase"], event.name
        self._close("pause", scope, at)
        if phase != "running":
            self._open("pause", scope, f"{scope} {phase}", at, event.fields)
        if event.fields["gate"] == "closed" and scope == "engine":  # the lanes show the gap
            for lane in self._lanes.values():
                self._end_tokens(lane, at)

    def _held(self, event: Event) -> None:
        key = f"{event.name}/{event.fields['hold_id']}"
        if ("hold", key) not in self._spans:
            self._open("hold", key, "hold", _us(event.at), event.fields)

    def _released(self, event: Event) -> None:
        self._close("hold", f"{event.name}/{event.fields['hold_id']}", _us(event.at), event.fields)

    def _session(self, event: Event) -> None:
        at, what = _us(event.at), event.fields["event"]
        if what == "begin":
            self._open("session", event.name, "weight session", at, event.fields)
        elif event.fields["state"] == "ended":
            self._close("session", event.name, at, event.fields)
        elif ("session", event.name) in self._spans:
            self._put("n", what, at, 0, cat="session", id=event.name, args=event.fields)

    def _committed(self, event: Event) -> None:
        args = {"scope": event.name, **event.fields}
        self._put("i", f"commit of {event.fields['version']}", _us(event.at), STEPS_TID, s="g", args=args)

    # ------------------------------------------------------------------ the format

    def _open(self, cat: str, of: str, name: str, at: int, args: dict[str, Any]) -> None:
        self._close(cat, of, at)
        self._spans[cat, of] = name
        self._num_waiting += cat == "waiting"
        self._put("b", name, at, 0, cat=cat, id=of, args=args)

    def _close(self, cat: str, of: str, at: int, args: dict[str, Any] | None = None) -> None:
        if (name := self._spans.pop((cat, of), None)) is not None:
            self._num_waiting -= cat == "waiting"
            self._put("e", name, at, 0, cat=cat, id=of, args=args or {})

    def _complete(self, name: str, began: int, end: int, tid: int, args: dict[str, Any]) -> None:
        self._put("X", name, began, tid, dur=end - began, args=args)

    def _name(self, what: str, tid: int, name: str) -> None:
        self._put("M", what, 0, tid, args={"name": name})

    def _put(self, ph: str, name: str, ts: int, tid: int, **more: Any) -> None:
        self._out.append({"ph": ph, "name": name, "ts": ts, "pid": self._pid, "tid": tid, **more})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
