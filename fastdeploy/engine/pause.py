"""Pause and resume of one scope: holds, the two flags, and the phases.

A pause closes the door (``rejecting_new_requests``) and lets the requests end that must end. Then a fence proves that
every output has reached its API server, and the caches are brought into the state asked for. Only then ``is_paused``:

    RUNNING --place--> DRAINING --quiesced--> PAUSED --release the last hold--> RUNNING
                          \\-------------------release the last hold-------------^

Each pause call places a hold. The strongest standing hold decides: abort > keep > wait. A scope that is PAUSED runs
again when the last hold is gone, and not before, whatever becomes of the stronger holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from fastdeploy.core.errors import (
    FastDeployError,
    HoldNotFound,
    InvalidField,
    PauseInterrupted,
    PauseTimeout,
    ResumeRefused,
)
from fastdeploy.core.scope import WHOLE_ENGINE, Scope
from fastdeploy.engine.delivery import DeliveryFence
from fastdeploy.engine.holds import (
    CLEARS_CACHE,
    GATES,
    NATIVE_ADMISSION,
    SYSTEM,
    SYSTEM_HOLDS,
    TRANSITIONS,
    Admission,
    Hold,
    Mode,
    PauseEvent,
    PausePhase,
    expiry,
)
from fastdeploy.engine.lifecycle import Counts, RequestLifecycle, SilentClients
from fastdeploy.inter_communicator.messages import Args, PauseArgs, RenewArgs, ResumeArgs
from fastdeploy.scheduler.queue import Gate

FENCE_TIMEOUT_S = 5.0  # after so long without an acknowledgement the API server's process is looked at
MAX_HOLDS = 1024

Answer = Callable[[dict[str, Any], FastDeployError | None], None]


@dataclass
class PauseCall:
    """A pause that has not been answered yet. ``answer`` is called exactly once."""

    hold: Hold
    clear_cache: bool
    deadline: float
    on_timeout: str
    started_at: float
    baseline: Counts
    answer: Answer
    escalated_by: str | None = None
    aborted_ids: list[str] = field(default_factory=list)
    forced_ids: list[str] = field(default_factory=list)
    silent: SilentClients = field(default_factory=lambda: SilentClients([], []))


class PauseState:
    """The pause state of one scope. While it has a hold ``settle`` is called between any two steps, after the messages
    that came."""

    def __init__(self, scope: Scope, lifecycle: RequestLifecycle, clock: Callable[[], float] = time.monotonic):
        self.scope = scope
        self._lifecycle = lifecycle
        self._clock = clock
        self.phase = PausePhase.RUNNING
        self.holds: dict[str, Hold] = {}
        self._calls: list[PauseCall] = []
        self._num_anonymous = 0
        self._fence: DeliveryFence | None = None

    # ------------------------------------------------------------------ what others read

    @property
    def mode(self) -> Mode | None:
        return max((h.mode for h in self.holds.values()), default=None)

    @property
    def admission(self) -> Admission | None:
        return max((h.admission for h in self.holds.values()), default=None)

    @property
    def rejecting_new_requests(self) -> bool:
        """True from the first moment of a pause until the last hold is gone."""
        return bool(self.holds)

    @property
    def is_paused(self) -> bool:
        return self.phase is PausePhase.PAUSED

    @property
    def gate(self) -> Gate:
        mode = self.mode
        return Gate.OPEN if mode is None else GATES[self.phase, mode]

    @property
    def unanswered(self) -> int:
        return len(self._calls)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if nothing happens, on the clock given."""
        due = [h.expires_at for h in self.holds.values() if h.expires_at is not None]
        due += [c.deadline for c in self._calls]
        if self._fence is not None:
            due.append(self._fence.deadline)
        return min(due, default=None)

    # ------------------------------------------------------------------ calls

    def pause(self, args: PauseArgs, answer: Answer) -> None:
        """Place or renew a hold. ``answer(report, error)`` is called once, when quiesced or failed. Raises
        InvalidField, and changes nothing, if an argument is out of range."""
        standing = self.mode
        self._place(self._new_call(args, answer), standing)

    def pause_for_system(
        self, hold_id: str, mode: str, clear_cache: bool, timeout_s: float, locked: str, answer: Answer
    ) -> None:
        """Pause with a system hold, which is released if the drain does not end in time. ``locked``: why a resume by
        its name is refused."""
        args = PauseArgs(
            mode=mode,
            clear_cache=clear_cache,
            admission="hold",
            timeout_s=timeout_s,
            on_timeout="cancel",
            placed_by=SYSTEM,
        )
        standing = self.mode
        call = self._new_call(args, answer, system_hold=hold_id)
        call.hold.locked = locked
        self._place(call, standing)

    def _place(self, call: PauseCall, standing: Mode | None) -> None:
        """``standing``: the mode in force before the call's hold."""
        self.holds[call.hold.id] = call.hold
        if standing is not None and call.hold.mode > standing:
            self._escalate_others(call)
        self._calls.append(call)
        self._advance(PauseEvent.PLACE)
        call.aborted_ids = self._enforce(call.hold.mode, f"paused by hold {call.hold.id!r}")

    def place_system_hold(self, hold_id: str, mode: Mode, admission: Admission, locked: str = "") -> None:
        """Place a hold for the engine itself. Only its name releases it, and if it is ``locked`` no caller can."""
        now = self._clock()
        self.holds[hold_id] = Hold(hold_id, self.scope.id, mode, admission, False, SYSTEM, True, now, locked=locked)
        self._advance(PauseEvent.PLACE)
        self._enforce(mode, f"paused by hold {hold_id!r}")

    def resume(self, args: ResumeArgs) -> dict[str, Any]:
        """Release one hold by name, or all anonymous ones. An unknown name is reported and is no error. Raises
        ResumeRefused for a hold that is locked."""
        if args.hold_id in self.holds and (why := self.holds[args.hold_id].locked):
            raise ResumeRefused(f"hold_id: {args.hold_id!r} cannot be released: {why}", param="hold_id")
        if args.hold_id is None:
            released = [h.id for h in self.holds.values() if not h.named]
        else:
            released = [args.hold_id] if args.hold_id in self.holds else []
        self._release(released, "resumed")
        return {
            "status": "running" if not self.holds else "held",
            "state": self.phase.value,
            "released": released,
            "unknown": [args.hold_id] if args.hold_id is not None and not released else [],
            "still_held_by": list(self.holds),
            **self.scope.weights_label(),
        }

    def renew(self, args: RenewArgs) -> dict[str, Any]:
        """Set the time at which a standing hold ends by itself. Raises HoldNotFound if no caller's hold of that name
        stands: the engine may run."""
        hold = self.holds.get(args.hold_id)
        if hold is None or hold.placed_by == SYSTEM:
            why = "it was released, its ttl ended, or the engine restarted"
            raise HoldNotFound(f"hold_id: {args.hold_id!r} does not stand: {why}", param="hold_id")
        now = self._clock()
        hold.expires_at = expiry(args.ttl_s, now)
        return {"hold": hold.describe(now), "state": self.phase.value, "is_paused": self.is_paused}

    def release_system_hold(self, hold_id: str) -> None:
        hold = self.holds.get(hold_id)
        self._release([hold_id] if hold is not None and hold.placed_by == SYSTEM else [], "released")

    def status(self) -> dict[str, Any]:
        """Return both flags, the phase, the holds and the counts."""
        now, counts = self._clock(), self._lifecycle.counts(self.scope)
        frozen = counts.started if self.is_paused else 0
        return {
            "is_paused": self.is_paused,
            "rejecting_new_requests": self.rejecting_new_requests,
            "phase": self.phase.value,
            "mode": self.mode.name.lower() if self.mode else None,
            "admission": self.admission.name.lower() if self.admission else None,
            "holds": [h.describe(now) for h in self.holds.values()],
            "counts": {"running": counts.started - frozen, "frozen": frozen, "queued": counts.queued},
            **self.scope.weights_label(),
        }

    def fail(self, error: FastDeployError) -> None:
        """Answer every call that waits: the engine cannot go on."""
        for call in self._calls:
            call.answer(self._report(call, "failed"), error)
        self._calls.clear()

    # ------------------------------------------------------------------ progress

    def settle(self) -> None:
        """Expire what is due, and move on as far as the state of the engine allows."""
        self._expire(self._clock())
        at_rest = self.phase is PausePhase.RUNNING or (self.phase is PausePhase.PAUSED and not self._calls)
        if at_rest or not self._drained():
            self._lower_fence()
            return
        # A pause that joins keeps the fence that is up: else a silent client could be given time for ever.
        if self._fence is None or self._fence.overtaken:
            self._fence = self._lifecycle.raise_fence(self.scope, self._clock() + FENCE_TIMEOUT_S)
        if self._fence.passed:
            self._quiesced()

    def _lower_fence(self) -> None:
        if self._fence is not None:
            self._lifecycle.delivery.lower_fence(self._fence)
            self._fence = None

    def _drained(self) -> bool:
        """Whether nothing is left to wait for. Frozen requests need no draining; in mode wait all that have started
        must come to an end."""
        return self.gate is Gate.CLOSED or self._lifecycle.drained(self.scope)

    def _quiesced(self) -> None:
        self._lower_fence()
        self._advance(PauseEvent.QUIESCED)
        self._apply_gate()
        if any(call.clear_cache for call in self._calls):
            self._lifecycle.scheduler.drop_kv(self.scope)
        calls, self._calls = self._calls, []
        for call in calls:
            call.answer(self._report(call, "paused"), None)

    def _expire(self, now: float) -> None:
        expired = [h.id for h in self.holds.values() if h.expires_at is not None and h.expires_at <= now]
        self._release(expired, "the hold's ttl ended")
        if self._fence is not None and self._fence.deadline <= now:
            self._look_at_silent_clients(self._fence, now)
        # Each iteration answers the call or extends its deadline, and may answer other calls that share its hold.
        while (call := next((c for c in self._calls if c.deadline <= now), None)) is not None:
            self._time_out(call, now)

    def _look_at_silent_clients(self, fence: DeliveryFence, now: float) -> None:
        """Count as gone every API server that has not acknowledged the fence and does not run: it is dead, or stopped.
        One that runs is slow, and has time until the first call that waits is due; then it is counted as gone too."""
        first_due = min((c.deadline for c in self._calls), default=now)
        silent = self._lifecycle.give_up_on_silent_clients(fence, spare_running=first_due > now)
        for call in self._calls:
            call.silent = SilentClients(_union(call.silent.slow, silent.slow), call.silent.dropped + silent.dropped)
        fence.deadline = min(now + FENCE_TIMEOUT_S, first_due) if silent.slow else now + FENCE_TIMEOUT_S

    def _time_out(self, call: PauseCall, now: float) -> None:
        if self._drained():  # only the fence is missing, and that has a bound of its own
            call.deadline = self._fence.deadline if self._fence is not None else now + FENCE_TIMEOUT_S
        elif call.on_timeout == "cancel":
            error = PauseTimeout("the drain did not end within timeout_s; the hold is released (on_timeout=cancel)")
            self._release([call.hold.id], "the drain timed out", error)
        else:
            mode = Mode[call.on_timeout.upper()]
            self._escalate_others(call)
            call.escalated_by = "timeout"
            call.hold.mode = max(call.hold.mode, mode)
            call.deadline = now + 2 * FENCE_TIMEOUT_S
            call.forced_ids = self._enforce(mode, "the drain timed out (on_timeout=abort)")
            call.aborted_ids += call.forced_ids

    def _enforce(self, mode: Mode, why: str) -> list[str]:
        """Do at once what a mode does to the requests that are there. Later arrivals meet the gate. Returns the ids
        that were aborted."""
        self._apply_gate()
        return self._lifecycle.abort_all(why, self.scope) if mode is Mode.ABORT else []

    def _apply_gate(self) -> None:
        self._lifecycle.scheduler.set_gate(self.scope, self.gate)

    def _escalate_others(self, call: PauseCall) -> None:
        for other in self._calls:
            if other is not call:
                other.escalated_by = call.hold.id

    def _release(self, hold_ids: list[str], why: str, error: FastDeployError | None = None) -> None:
        if not hold_ids:
            return
        for hold_id in hold_ids:
            del self.holds[hold_id]
        interrupted = [c for c in self._calls if c.hold.id in hold_ids]
        self._calls = [c for c in self._calls if c.hold.id not in hold_ids]
        if not self.holds:
            self._advance(PauseEvent.RELEASE_LAST)
        self._apply_gate()
        for call in interrupted:
            default = PauseInterrupted(f"hold {call.hold.id!r} was released while it was draining: {why}")
            call.answer(self._report(call, "interrupted"), error or default)

    def _advance(self, event: PauseEvent) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    # ------------------------------------------------------------------ calls in, reports out

    def _new_call(self, args: PauseArgs, answer: Answer, system_hold: str | None = None) -> PauseCall:
        mode = _choice(Mode, "mode", args.mode)
        admission = NATIVE_ADMISSION[mode]
        if args.admission is not None:
            admission = _choice(Admission, "admission", args.admission)
        on_timeout = args.on_timeout or ("abort" if mode is Mode.ABORT else "keep")
        if on_timeout not in ("keep", "abort", "cancel"):
            raise InvalidField("on_timeout", f"expected keep, abort or cancel, got {on_timeout!r}")
        if not 0.0 <= args.timeout_s <= 86400.0:
            raise InvalidField("timeout_s", f"expected seconds from 0 to 86400, got {args.timeout_s!r}")
        if args.hold_id is not None and not 0 < len(args.hold_id) <= 256:
            raise InvalidField("hold_id", "expected 1 to 256 characters")
        if args.hold_id in SYSTEM_HOLDS:
            raise InvalidField("hold_id", f"{args.hold_id!r} is the name of a hold of the system's own")
        now = self._clock()
        expires_at = expiry(args.ttl_s, now)
        clear_cache = CLEARS_CACHE[mode] if args.clear_cache is None else args.clear_cache
        hold = self._hold_for(args, system_hold or args.hold_id, mode, admission, clear_cache, now)
        hold.expires_at = expires_at
        return PauseCall(
            hold, clear_cache, now + args.timeout_s, on_timeout, now, self._lifecycle.counts(self.scope), answer
        )

    def _hold_for(
        self, args: PauseArgs, name: str | None, mode: Mode, admission: Admission, clear_cache: bool, now: float
    ) -> Hold:
        """Return a new hold, or the standing hold of that name, made at least as strong."""
        standing = self.holds.get(name) if name is not None else None
        if standing is not None:
            standing.mode = max(standing.mode, mode)
            standing.admission = max(standing.admission, admission)
            standing.named = True  # a caller that names an anonymous hold owns it from now on
            return standing
        if len(self.holds) >= MAX_HOLDS:
            raise InvalidField("hold_id", f"{MAX_HOLDS} holds stand already; resume, or name yours")
        named = name is not None
        while name is None or (not named and name in self.holds):
            self._num_anonymous += 1
            name = f"anonymous-{self._num_anonymous}"
        return Hold(name, self.scope.id, mode, admission, clear_cache, args.placed_by, named, now)

    def _report(self, call: PauseCall, status: str) -> dict[str, Any]:
        now, counts, before = self._clock(), self._lifecycle.counts(self.scope), call.baseline
        mode = self.mode or call.hold.mode
        admission = self.admission or call.hold.admission
        return {
            "status": status,
            "state": self.phase.value,
            "mode": mode.name.lower(),
            "scope": self.scope.id,
            "hold": call.hold.describe(now),
            "admission": admission.name.lower(),
            "is_paused": self.is_paused,
            "rejecting_new_requests": self.rejecting_new_requests,
            **self.scope.weights_label(),
            "counts": {
                "aborted": counts.aborted - before.aborted,
                "drained": counts.finished - before.finished,
                "kept": counts.started,
                "queued": counts.queued,
            },
            "tokens_returned": counts.aborted_tokens - before.aborted_tokens,
            "aborted_ids": call.aborted_ids,
            "forced_ids": call.forced_ids,
            "slow_api_servers": call.silent.slow,
            "dropped_api_servers": call.silent.dropped,
            "escalated_by": call.escalated_by,
            "elapsed_ms": round((now - call.started_at) * 1000, 3),
        }


def _union(first: list[int], second: list[int]) -> list[int]:
    return list(dict.fromkeys([*first, *second]))


def leaves_no_use_for_a_step(args: Args) -> bool:
    """Whether a call with these arguments is a pause of the whole engine that closes the gate at once. The tokens of a
    step in flight would have to wait for the resume (keep), or nobody would wait for them (abort)."""
    if not isinstance(args, PauseArgs) or args.scope != WHOLE_ENGINE:
        return False
    mode = Mode.__members__.get(args.mode.upper())
    return mode is not None and GATES[PausePhase.DRAINING, mode] is Gate.CLOSED


def _choice(enum: type[IntEnum], name: str, value: str) -> Any:
    try:
        return enum[value.upper()]
    except KeyError:
        raise InvalidField(name, f"expected one of {', '.join(m.name.lower() for m in enum)}, got {value!r}") from None
