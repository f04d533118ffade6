"""One weight session: its states as a table, and its data. ``weights.py`` drives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.runner import Staging
from fastdeploy.core.weight_source import MAX_VERSION_CHARS

MAX_SECONDS = 86400.0

Answer = Callable[[dict[str, Any], FastDeployError | None], None]


class SessionState(Enum):
    OPEN = "open"  # takes chunks
    COMMITTING = "committing"  # takes nothing more; completeness is being checked
    READY = "ready"  # complete; the swap comes next
    ENDED = "ended"


class SessionEvent(Enum):
    CHUNK = "chunk"
    COMMIT = "commit"
    CHECKED = "checked"
    SWAP = "swap"
    END = "end"  # aborted, refused, or its lease ended: the old weights serve on


# An event that is not listed is our own mistake and raises KeyError.
TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.OPEN, SessionEvent.CHUNK): SessionState.OPEN,
    (SessionState.OPEN, SessionEvent.COMMIT): SessionState.COMMITTING,
    (SessionState.COMMITTING, SessionEvent.CHECKED): SessionState.READY,
    (SessionState.READY, SessionEvent.SWAP): SessionState.ENDED,
    (SessionState.OPEN, SessionEvent.END): SessionState.ENDED,
    (SessionState.COMMITTING, SessionEvent.END): SessionState.ENDED,
    (SessionState.READY, SessionEvent.END): SessionState.ENDED,
}


@dataclass
class Session:
    """See messages.BeginUpdateArgs for what the caller asked for.

    pending: chunks that have not been answered; while there are any the lease does not run. timeout_s: seconds that
    each chunk, and the check of the commit, may take. staging: None when the session has ended. tensors, nbytes:
    received so far. stage_s: seconds of work of the staging thread. Times on the loop's clock.
    """

    id: str
    version: str | None
    expected_version: str | None
    kv: str
    partial: bool
    in_place: bool
    lease_s: float
    timeout_s: float
    staging: Staging | None
    placed_by: str
    started_at: float
    expires_at: float
    state: SessionState = SessionState.OPEN
    pending: int = 0
    tensors: int = 0
    nbytes: int = 0
    stage_s: float = 0.0
    ready_at: float = 0.0
    staged: Any = None
    answer: Answer | None = None  # of its commit

    @property
    def open_staging(self) -> Staging:
        """The staging of a session that has not ended."""
        assert self.staging is not None
        return self.staging

    def advance(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def describe(self, now: float) -> dict[str, Any]:
        return {
            "session_id": self.id,
            "state": self.state.value,
            "placed_by": self.placed_by,
            "version": self.version,
            "partial": self.partial,
            "in_place": self.in_place,
            "tensors_received": self.tensors,
            "nbytes_received": self.nbytes,
            "age_s": round(now - self.started_at, 3),
            "lease_left_s": round(max(self.expires_at - now, 0.0), 3),
        }


def check_label(field: str, version: str | None) -> None:
    """Raise InvalidField unless ``version`` can be a label of weights, or is absent."""
    if version is not None and not 1 <= len(version) <= MAX_VERSION_CHARS:
        raise InvalidField(field, f"expected 1 to {MAX_VERSION_CHARS} characters, got {len(version)}")


def check_kv(kv: str | None) -> None:
    if kv not in (None, "keep", "recompute"):
        raise InvalidField("kv", f"expected keep or recompute, got {kv!r}")


def check_seconds(field: str, seconds: float) -> None:
    if not 0.0 < seconds <= MAX_SECONDS:
        raise InvalidField(field, f"expected seconds above 0 and at most {MAX_SECONDS:g}, got {seconds!r}")
