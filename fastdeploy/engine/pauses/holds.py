"""Modes, admissions and phases of a pause, as tables, and the hold of a pause call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from fastdeploy.core.config import MAX_TTL_S
from fastdeploy.core.errors import InvalidField
from fastdeploy.scheduler.queue import Gate


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
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class PauseEvent(Enum):
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


def expiry(ttl_s: float | None, now: float) -> float | None:
    """Return the end of a hold with this ttl, on the clock of ``now``. None: no ttl. Raises InvalidField."""
    if ttl_s is not None and not 0.0 < ttl_s <= MAX_TTL_S:
        raise InvalidField("ttl_s", f"expected seconds above 0 and at most 31 days, got {ttl_s!r}")
    return None if ttl_s is None else now + ttl_s
