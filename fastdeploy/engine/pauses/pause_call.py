"""One pause call: the check of its arguments, and the report that answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.served_weights import WHOLE_ENGINE
from fastdeploy.engine.pauses.holds import (
    CLEARS_CACHE,
    GATES,
    NATIVE_ADMISSION,
    REPUBLISH,
    SYSTEM,
    SYSTEM_HOLDS,
    Admission,
    Hold,
    Mode,
    PausePhase,
)
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.requests.lifecycle import Counts, SilentClients
from fastdeploy.inter_communicator.messages import Args, PauseArgs
from fastdeploy.scheduler.queue import Gate

E = TypeVar("E", bound=IntEnum)


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


def makes_step_useless(args: Args) -> bool:
    """Return whether ``args`` are those of a pause of the whole engine that closes the gate at once. The tokens of the
    step in flight would wait for the resume (keep) or would be thrown away (abort)."""
    if not isinstance(args, PauseArgs) or args.scope != WHOLE_ENGINE:
        return False
    mode = Mode.__members__.get(args.mode.upper())
    return mode is not None and GATES[PausePhase.DRAINING, mode] is Gate.CLOSED


@dataclass
class PauseCall:
    """A pause call without an answer yet. ``answer`` is called exactly once. Times are on the loop's clock. baseline:
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
