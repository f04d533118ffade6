"""Modes, admissions and phases of a pause, as tables; and a pause call: its terms, its hold and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeVar

from fastdeploy.core.config import MAX_TTL_S
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.served_weights import WHOLE_ENGINE
from fastdeploy.engine.requests.delivery import Answer, SilentClients
from fastdeploy.engine.requests.lifecycle import Counts
from fastdeploy.inter_communicator.messages import Args, PauseArgs
from fastdeploy.scheduler.queue import Gate

E = TypeVar("E", bound=IntEnum)


class Mode(IntEnum):
    """Modes of a pause, in order of strength."""

    WAIT = 1
    KEEP = 2
    ABORT = 3


class Admission(IntEnum):
    """Treatment of requests that arrive during a pause: HOLD (they wait) or REJECT (503). REJECT has priority."""

    HOLD = 1
    REJECT = 2


NATIVE_ADMISSION = {Mode.ABORT: Admission.REJECT, Mode.WAIT: Admission.HOLD, Mode.KEEP: Admission.HOLD}
CLEARS_CACHE = {Mode.ABORT: True, Mode.WAIT: True, Mode.KEEP: False}
SYSTEM = "system"  # placed_by of the engine's own holds
REPUBLISH = "republish"
SYSTEM_HOLDS = frozenset({"sleep", REPUBLISH})  # their names, which are reserved


class ReleaseReason(Enum):
    """Reasons for the end of a hold, with the text of errors."""

    RESUME = "resumed"
    TTL = "the hold's ttl ended"
    CANCEL = "the drain timed out"


class PausePhase(Enum):
    """The states of a scope's pause, see TRANSITIONS."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class PauseEvent(Enum):
    """What moves a pause from one phase to another, see TRANSITIONS."""

    PLACE = "place"
    QUIESCED = "quiesced"
    RELEASE_LAST = "release_last"


TRANSITIONS: dict[tuple[PausePhase, PauseEvent], PausePhase] = {
    (PausePhase.RUNNING, PauseEvent.PLACE): PausePhase.DRAINING,
    (PausePhase.DRAINING, PauseEvent.PLACE): PausePhase.DRAINING,
    (PausePhase.PAUSED, PauseEvent.PLACE): PausePhase.PAUSED,
    (PausePhase.DRAINING, PauseEvent.QUIESCED): PausePhase.PAUSED,
    (PausePhase.PAUSED, PauseEvent.QUIESCED): PausePhase.PAUSED,  # a pause call that came while paused
    (PausePhase.DRAINING, PauseEvent.RELEASE_LAST): PausePhase.RUNNING,
    (PausePhase.PAUSED, PauseEvent.RELEASE_LAST): PausePhase.RUNNING,
}

# (phase, mode) -> which sequences the scheduler may plan. Without a hold the gate is open.
GATES: dict[tuple[PausePhase, Mode], Gate] = {
    (PausePhase.DRAINING, Mode.WAIT): Gate.STARTED_ONLY,
    (PausePhase.DRAINING, Mode.KEEP): Gate.CLOSED,
    (PausePhase.DRAINING, Mode.ABORT): Gate.CLOSED,
    (PausePhase.PAUSED, Mode.WAIT): Gate.CLOSED,
    (PausePhase.PAUSED, Mode.KEEP): Gate.CLOSED,
    (PausePhase.PAUSED, Mode.ABORT): Gate.CLOSED,
}


@dataclass
class Hold:
    """One reason why a scope is paused. id: the name in the pause call, or a generated one for an anonymous hold.
    scope: id of the paused scope. named: False for an anonymous hold. locked: reason why no resume may release the
    hold; empty = a resume may."""

    id: str
    scope: str
    mode: Mode
    admission: Admission
    clear_cache: bool
    placed_by: str
    named: bool
    placed_at: float
    expires_at: float | None = None
    locked: str = ""

    def describe(self, now: float) -> dict[str, Any]:
        return {
            "id": self.id,
            "scope": self.scope,
            "mode": self.mode.name.lower(),
            "admission": self.admission.name.lower(),
            "clear_cache": self.clear_cache,
            "placed_by": self.placed_by,
            "named": self.named,
            "age_s": round(now - self.placed_at, 3),
            "ttl_left_s": None if self.expires_at is None else round(max(self.expires_at - now, 0.0), 3),
        }


class PauseTerms(NamedTuple):
    """Checked arguments of a pause, with defaults filled in."""

    mode: Mode
    admission: Admission
    clear_cache: bool
    on_timeout: str


def read_terms(args: PauseArgs) -> PauseTerms:
    """Check the arguments of a pause. Raises InvalidField."""
    mode = _member(Mode, "mode", args.mode)
    admission = NATIVE_ADMISSION[mode] if args.admission is None else _member(Admission, "admission", args.admission)
    on_timeout = args.on_timeout or ("abort" if mode is Mode.ABORT else "keep")
    if on_timeout not in ("keep", "abort", "cancel"):
        raise InvalidField("on_timeout", f"expected keep, abort or cancel, got {on_timeout!r}")
    if not 0.0 <= args.timeout_s <= 86400.0:
        raise InvalidField("timeout_s", f"expected seconds from 0 to 86400, got {args.timeout_s!r}")
    if args.hold_id is not None and not 0 < len(args.hold_id) <= 256:
        raise InvalidField("hold_id", "expected 1 to 256 characters")
    of_fleet = args.placed_by == SYSTEM and args.hold_id == REPUBLISH  # a fleet that has lost its weights
    if args.hold_id in SYSTEM_HOLDS and not of_fleet:
        raise InvalidField("hold_id", f"{args.hold_id!r} is reserved for the engine's own holds")
    return PauseTerms(mode, admission, CLEARS_CACHE[mode] if args.clear_cache is None else args.clear_cache, on_timeout)


def expiry(ttl_s: float | None, now: float) -> float | None:
    """Return the end of a hold with this ttl, on the clock of ``now``. None: no ttl. Raises InvalidField."""
    if ttl_s is not None and not 0.0 < ttl_s <= MAX_TTL_S:
        raise InvalidField("ttl_s", f"expected seconds above 0 and at most 31 days, got {ttl_s!r}")
    return None if ttl_s is None else now + ttl_s


def closes_whole_engine(args: Args) -> bool:
    """Return whether ``args`` are those of a pause that closes the gate of the whole engine at once. The tokens of the
    step in flight would then wait for the resume (keep) or be thrown away (abort)."""
    if not isinstance(args, PauseArgs) or args.scope != WHOLE_ENGINE:
        return False
    mode = Mode.__members__.get(args.mode.upper())
    return mode is not None and GATES[PausePhase.DRAINING, mode] is Gate.CLOSED


@dataclass
class PauseCall:
    """A pause call that has no answer yet. ``answer`` is called exactly once. Times are on the loop's clock. baseline:
    counts of the scope when the call came."""

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

    def note_silent(self, silent: SilentClients) -> None:
        """Add the API servers that did not acknowledge the fence in time."""
        slow = list(dict.fromkeys([*self.silent.slow, *silent.slow]))
        self.silent = SilentClients(slow, self.silent.dropped + silent.dropped)

    def report(self, counts: Counts, now: float) -> dict[str, Any]:
        """Return the effect of this call since it came. counts: of the scope at ``now``."""
        before = self.baseline
        return {
            "hold": self.hold.describe(now),
            "counts": {
                "aborted": counts.aborted - before.aborted,
                "drained": counts.finished - before.finished,
                "kept": counts.started,
                "queued": counts.queued,
            },
            "tokens_returned": counts.aborted_tokens - before.aborted_tokens,
            "aborted_ids": self.aborted_ids,
            "forced_ids": self.forced_ids,
            "slow_api_servers": self.silent.slow,
            "dropped_api_servers": self.silent.dropped,
            "escalated_by": self.escalated_by,
            "elapsed_ms": round((now - self.started_at) * 1000, 3),
        }


def _member(enum: type[E], name: str, value: str) -> E:
    try:
        return enum[value.upper()]
    except KeyError:
        raise InvalidField(name, f"expected one of {', '.join(m.name.lower() for m in enum)}, got {value!r}") from None
