"""Pause and resume of one scope: holds, the two flags, and the phases.

A pause sets ``rejecting_new_requests`` and drains the requests that must end. Then a fence proves that every output has
reached its API server, and the KV cache is cleared if the call asks for it. Only then is ``is_paused`` true:

    RUNNING --place--> DRAINING --quiesced--> PAUSED --release the last hold--> RUNNING
                          \\-------------------release the last hold-------------^

Each pause call places a hold. The strongest standing hold decides the mode: abort > keep > wait. A paused scope runs
again when its last hold is released, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdeploy.core.errors import FastDeployError, HoldNotFound, PauseInterrupted, PauseTimeout, ResumeRefused
from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.request import Scope
from fastdeploy.engine.pauses.holds import (
    GATES,
    SYSTEM,
    TRANSITIONS,
    Admission,
    Hold,
    Mode,
    PauseCall,
    PauseEvent,
    PausePhase,
    PauseTerms,
    ReleaseReason,
    expiry,
    read_terms,
)
from fastdeploy.engine.requests.delivery import Answer, Delivery, DeliveryFence
from fastdeploy.engine.requests.lifecycle import RequestLifecycle
from fastdeploy.inter_communicator.messages import PauseArgs, RenewArgs, ResumeArgs
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.queue import Gate
from fastdeploy.scheduler.scheduler import Scheduler

FENCE_TIMEOUT_S = 5.0  # time for an acknowledgement; then the engine checks whether the API server's process runs


class PauseState:
    """The pause state of one scope. The loop calls ``settle`` between any two steps, after it has handled the messages,
    unless the scope is ``at_rest`` and no deadline has come. metrics: count the pauses; None for an adapter."""

    def __init__(
        self,
        scope: Scope,
        scheduler: Scheduler,
        lifecycle: RequestLifecycle,
        delivery: Delivery,
        clock: Callable[[], float],
        events: EventLog,
        metrics: EngineMetrics | None = None,
    ):
        self.scope = scope
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._delivery = delivery
        self._clock = clock
        self._events = events
        self._metrics = metrics
        self.phase = PausePhase.RUNNING
        self._reported = (self.phase, Gate.OPEN)  # in the last PHASE event
        self._began = 0.0
        self.holds: dict[str, Hold] = {}
        self._calls: list[PauseCall] = []
        self._num_anonymous = 0
        self._fence: DeliveryFence | None = None

    # ------------------------------------------------------------------ state

    @property
    def mode(self) -> Mode | None:
        return max((h.mode for h in self.holds.values()), default=None)

    @property
    def admission(self) -> Admission | None:
        return max((h.admission for h in self.holds.values()), default=None)

    @property
    def rejecting_new_requests(self) -> bool:
        """True from the start of a pause until the last hold is released."""
        return bool(self.holds)

    @property
    def is_paused(self) -> bool:
        return self.phase is PausePhase.PAUSED

    @property
    def at_rest(self) -> bool:
        """Whether the scope runs or is quiesced, and no call waits for that."""
        return self.phase is PausePhase.RUNNING or (self.phase is PausePhase.PAUSED and not self._calls)

    @property
    def gate(self) -> Gate:
        mode = self.mode
        return Gate.OPEN if mode is None else GATES[self.phase, mode]

    @property
    def unanswered(self) -> int:
        return len(self._calls)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if no message comes, on the loop's clock."""
        due = [h.expires_at for h in self.holds.values() if h.expires_at is not None]
        due += [c.deadline for c in self._calls]
        if self._fence is not None:
            due.append(self._fence.deadline)
        return min(due, default=None)

    # ------------------------------------------------------------------ calls

    def pause(self, args: PauseArgs, answer: Answer, system_hold: str | None = None, locked: str = "") -> None:
        """Place or renew a hold. ``answer(report, error)`` is called once, when the scope is quiesced or the pause has
        failed. Raises InvalidField, and changes nothing, if an argument is out of range.

        system_hold: name of the hold if it is the engine's own. locked: see Hold.
        """
        mode_before = self.mode
        call = self._new_call(args, answer, system_hold or args.hold_id)
        call.hold.locked = locked
        if mode_before is not None and call.hold.mode > mode_before:
            self._escalate_others(call)
        self._calls.append(call)
        self._place(call.hold)
        call.aborted_ids = self._enforce(call.hold.mode, f"paused by hold {call.hold.id!r}")

    def place_system_hold(self, hold_id: str, mode: Mode, admission: Admission, locked: str = "") -> None:
        """Place a hold of the engine's own. A resume must name the hold to release it; locked: see Hold."""
        now = self._clock()
        self._place(Hold(hold_id, self.scope.id, mode, admission, False, SYSTEM, True, now, locked=locked))
        self._enforce(mode, f"paused by hold {hold_id!r}")

    def resume(self, args: ResumeArgs) -> dict[str, Any]:
        """Release one hold by name, or all anonymous holds. An unknown name is no error: the reply lists it. Raises
        ResumeRefused for a locked hold."""
        if args.hold_id in self.holds and (why := self.holds[args.hold_id].locked):
            raise ResumeRefused(f"hold_id: {args.hold_id!r} cannot be released: {why}", param="hold_id")
        if args.hold_id is None:
            released = [h.id for h in self.holds.values() if not h.named]
        else:
            released = [args.hold_id] if args.hold_id in self.holds else []
        self._release(released, ReleaseReason.RESUME)
        return {
            "status": "running" if not self.holds else "held",
            "state": self.phase.value,
            "released": released,
            "unknown": [args.hold_id] if args.hold_id is not None and not released else [],
            "still_held_by": list(self.holds),
            **self.scope.weights_label(),
        }

    def renew(self, args: RenewArgs) -> dict[str, Any]:
        """Set the ttl of a standing hold anew. Raises HoldNotFound if no caller's hold of that name stands: then
        the engine may run."""
        hold = self.holds.get(args.hold_id)
        if hold is None or hold.placed_by == SYSTEM:
            why = "it was released, its ttl ended, or the engine restarted"
            raise HoldNotFound(f"hold_id: {args.hold_id!r} does not stand: {why}", param="hold_id")
        now = self._clock()
        hold.expires_at = expiry(args.ttl_s, now)
        return {"hold": hold.describe(now), "state": self.phase.value, "is_paused": self.is_paused}

    def release_system_hold(self, hold_id: str) -> None:
        hold = self.holds.get(hold_id)
        self._release([hold_id] if hold is not None and hold.placed_by == SYSTEM else [], ReleaseReason.RESUME)

    def status(self) -> dict[str, Any]:
        counts = self._lifecycle.counts(self.scope)
        return self.describe(counts.started, counts.queued)

    def describe(self, started: int, queued: int) -> dict[str, Any]:
        """Return the status, with the number of started and of queued choices of the scope."""
        now, frozen = self._clock(), started if self.is_paused else 0
        return {
            "is_paused": self.is_paused,
            "rejecting_new_requests": self.rejecting_new_requests,
            "phase": self.phase.value,
            "mode": self.mode.name.lower() if self.mode else None,
            "admission": self.admission.name.lower() if self.admission else None,
            "holds": [h.describe(now) for h in self.holds.values()],
            "counts": {"running": started - frozen, "frozen": frozen, "queued": queued},
            **self.scope.weights_label(),
        }

    def keep_holds(self) -> None:
        """Let no waiting call release its hold at its time-out. A gateway that begins to lead the fleet has found the
        hold here, or on another engine, and gives it to all engines."""
        for call in self._calls:
            if call.on_timeout == "cancel":
                call.on_timeout = "keep"

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting call with ``error``, when the engine ends."""
        for call in self._calls:
            call.answer(self._report(call, "failed"), error)
        self._calls.clear()

    # ------------------------------------------------------------------ progress

    def settle(self) -> None:
        """Release holds whose ttl has ended, time out calls, and advance the phase if the drain has ended."""
        self._expire(self._clock())
        if self.at_rest or not self._drained():
            self._lower_fence()
            return
        # A later pause call does not replace the fence: a client that never acknowledges must not get more time.
        if self._fence is None or self._fence.overtaken:
            self._lifecycle.hand_over([])
            now = self._clock()
            deadline = now + self._delivery.fence_timeout_s(FENCE_TIMEOUT_S)
            self._fence = self._delivery.raise_fence(self.scope, deadline, now + FENCE_TIMEOUT_S)
        if self._fence.passed:
            self._quiesced()

    def _lower_fence(self) -> None:
        if self._fence is not None:
            self._delivery.lower_fence(self._fence)
            self._fence = None

    def _drained(self) -> bool:
        """Return whether the drain has ended. In mode wait, all requests that have started must end first. With a
        closed gate, they are frozen and need not end."""
        return self.gate is Gate.CLOSED or self._scheduler.drained(self.scope)

    def _quiesced(self) -> None:
        self._lower_fence()
        self._advance(PauseEvent.QUIESCED)
        self._apply_gate()
        if any(call.clear_cache for call in self._calls):
            self._scheduler.drop_kv(self.scope)
        calls, self._calls = self._calls, []
        for call in calls:
            call.answer(self._report(call, "paused"), None)

    def _expire(self, now: float) -> None:
        expired = [h.id for h in self.holds.values() if h.expires_at is not None and h.expires_at <= now]
        self._release(expired, ReleaseReason.TTL)
        if self._fence is not None and self._fence.deadline <= now:
            self._check_silent_clients(self._fence, now)
        # Each iteration answers the call or extends its deadline. It may also answer other calls that share the hold.
        while (call := next((c for c in self._calls if c.deadline <= now), None)) is not None:
            self._time_out(call, now)

    def _check_silent_clients(self, fence: DeliveryFence, now: float) -> None:
        """Drop every API server that has not acknowledged the fence and whose process is dead or stopped. A server
        whose process runs is slow: it is dropped only at the deadline of the first waiting call."""
        first_due = min((c.deadline for c in self._calls), default=now)
        silent = self._delivery.give_up_on_silent_clients(fence, spare_running=first_due > now)
        self._lifecycle.hand_over([])
        for call in self._calls:
            call.note_silent(silent)
        later = now + self._delivery.fence_timeout_s(FENCE_TIMEOUT_S)
        if now < fence.last:  # others were kept until then
            later = min(later, fence.last)
        fence.deadline = min(later, first_due) if silent.slow else later

    def _time_out(self, call: PauseCall, now: float) -> None:
        if self._drained():  # only the fence is missing, and the fence has its own deadline
            call.deadline = self._fence.deadline if self._fence is not None else now + FENCE_TIMEOUT_S
        elif call.on_timeout == "cancel":
            error = PauseTimeout("the drain did not end within timeout_s; the hold is released (on_timeout=cancel)")
            self._release([call.hold.id], ReleaseReason.CANCEL, error)
        else:
            mode = Mode[call.on_timeout.upper()]
            self._escalate_others(call)
            call.escalated_by = "timeout"
            # An abort here ends what runs now. The hold itself keeps what comes later: its admission may be HOLD, and
            # the next gateway that leads a fleet gives the strongest mode of the hold to all engines.
            call.hold.mode = max(call.hold.mode, Mode.KEEP)
            call.deadline = now + 2 * FENCE_TIMEOUT_S
            call.forced_ids = self._enforce(mode, "the drain timed out (on_timeout=abort)")
            call.aborted_ids += call.forced_ids

    def _enforce(self, mode: Mode, why: str) -> list[str]:
        """Set the gate and, in mode abort, end all present requests. Return the ids of aborted requests."""
        self._apply_gate()
        return self._lifecycle.abort_all(why, self.scope) if mode is Mode.ABORT else []

    def _apply_gate(self) -> None:
        self._scheduler.set_gate(self.scope, self.gate)
        before, now = self._reported, (self.phase, self.gate)
        if before != now:
            self._reported = now
            self._measure(before[0])
            if self._events.watched:
                self._events.add(EventKind.PHASE, self.scope.id, phase=self.phase.value, gate=self.gate.value)

    def _measure(self, before: PausePhase) -> None:
        """Count a pause of the whole engine at its first hold, with the mode of this hold, and its duration at its
        end."""
        if self._metrics is None:
            return
        if before is PausePhase.RUNNING and self.mode is not None:
            self._began = self._clock()
            self._metrics.pauses.labels(self.mode.name.lower()).inc()
        elif self.phase is PausePhase.RUNNING:
            self._metrics.pause_seconds.observe([self._clock() - self._began])

    def _escalate_others(self, call: PauseCall) -> None:
        for other in self._calls:
            if other is not call:
                other.escalated_by = call.hold.id

    def _place(self, hold: Hold) -> None:
        """Place a new hold, or make a standing hold stronger."""
        self.holds[hold.id] = hold
        self._advance(PauseEvent.PLACE)
        if self._events.watched:
            fields = {"mode": hold.mode.name.lower(), "placed_by": hold.placed_by}
            self._events.add(EventKind.HELD, self.scope.id, hold_id=hold.id, **fields)

    def _release(self, hold_ids: list[str], why: ReleaseReason, error: FastDeployError | None = None) -> None:
        if not hold_ids:
            return
        for hold_id in hold_ids:
            del self.holds[hold_id]
            if self._events.watched:
                self._events.add(EventKind.RELEASED, self.scope.id, hold_id=hold_id, why=why.name.lower())
        interrupted = [c for c in self._calls if c.hold.id in hold_ids]
        self._calls = [c for c in self._calls if c.hold.id not in hold_ids]
        if not self.holds:
            self._advance(PauseEvent.RELEASE_LAST)
        self._apply_gate()
        for call in interrupted:
            default = PauseInterrupted(f"hold {call.hold.id!r} was released during the drain: {why.value}")
            call.answer(self._report(call, "interrupted"), error or default)

    def _advance(self, event: PauseEvent) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    # ------------------------------------------------------------------ new calls and reports

    def _new_call(self, args: PauseArgs, answer: Answer, name: str | None) -> PauseCall:
        now = self._clock()
        terms, expires_at = read_terms(args), expiry(args.ttl_s, now)
        hold = self._hold_for(args.placed_by, name, terms, now, owned=name is not None and not args.anonymous)
        hold.expires_at = expires_at
        counts = self._lifecycle.counts(self.scope)
        return PauseCall(hold, terms.clear_cache, now + args.timeout_s, terms.on_timeout, now, counts, answer)

    def _hold_for(self, placed_by: str, name: str | None, terms: PauseTerms, now: float, owned: bool) -> Hold:
        """Return a new hold, or the standing hold of that name, made at least as strong. owned: the caller will release
        the hold by its name."""
        standing = self.holds.get(name) if name is not None else None
        if standing is not None:
            standing.mode = max(standing.mode, terms.mode)
            standing.admission = max(standing.admission, terms.admission)
            standing.named |= owned  # a caller that names an anonymous hold owns it from now on
            return standing
        given = name is not None
        while name is None or (not given and name in self.holds):
            self._num_anonymous += 1
            name = f"anonymous-{self._num_anonymous}"
        return Hold(name, self.scope.id, terms.mode, terms.admission, terms.clear_cache, placed_by, owned, now)

    def _report(self, call: PauseCall, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "state": self.phase.value,
            "mode": (self.mode or call.hold.mode).name.lower(),
            "scope": self.scope.id,
            "admission": (self.admission or call.hold.admission).name.lower(),
            "is_paused": self.is_paused,
            "rejecting_new_requests": self.rejecting_new_requests,
            **self.scope.weights_label(),
            **call.report(self._lifecycle.counts(self.scope), self._clock()),
        }
