"""One weight session: its states as a table, and its data. ``weights.py`` runs the session."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastdeploy.core.errors import FastDeployError, InvalidField, SessionNotFound
from fastdeploy.core.runner import ChunkReceipt, Staging
from fastdeploy.core.weight_source import MAX_VERSION_CHARS
from fastdeploy.engine.delivery import Answer
from fastdeploy.engine.weight_streams import WeightStreams
from fastdeploy.inter_communicator.messages import UpdateChunkArgs, UpdateWeightsArgs

MAX_SECONDS = 86400.0
MAX_REMEMBERED = 64


class SessionState(Enum):
    OPEN = "open"  # accepts parts
    COMMITTING = "committing"  # accepts no more parts; the staging thread checks that all tensors are there
    READY = "ready"  # complete, and about to be swapped in
    ENDED = "ended"


class SessionEvent(Enum):
    PART = "part"
    COMMIT = "commit"
    CHECKED = "checked"
    SWAP = "swap"
    END = "end"  # aborted, refused, or the lease ended: the old weights stay


# An event that is not listed is our own mistake and raises KeyError.
TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.OPEN, SessionEvent.PART): SessionState.OPEN,
    (SessionState.OPEN, SessionEvent.COMMIT): SessionState.COMMITTING,
    (SessionState.COMMITTING, SessionEvent.CHECKED): SessionState.READY,
    (SessionState.READY, SessionEvent.SWAP): SessionState.ENDED,
    (SessionState.OPEN, SessionEvent.END): SessionState.ENDED,
    (SessionState.COMMITTING, SessionEvent.END): SessionState.ENDED,
    (SessionState.READY, SessionEvent.END): SessionState.ENDED,
}


@dataclass
class Session:
    """One update of weights. The first fields are described at messages.BeginUpdateArgs.

    staging: None when the session has ended. pending: parts without an answer yet. tensors, nbytes: received so far.
    stage_s: seconds that the staging thread has worked. streams: uploads that are being received. owner: the session
    ends with the connection of this client, while it waits for parts. staged: the complete weights, in state READY.
    answer: of the commit call. Times are on the loop's clock.
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
    streams: WeightStreams
    owner: str | None
    state: SessionState = SessionState.OPEN
    pending: int = 0
    tensors: int = 0
    nbytes: int = 0
    stage_s: float = 0.0
    ready_at: float = 0.0
    staged: Any = None
    answer: Answer | None = None

    @property
    def open_staging(self) -> Staging:
        """The staging of a session that has not ended."""
        assert self.staging is not None
        return self.staging

    @property
    def lease_runs(self) -> bool:
        """True if the lease may end. It does not end while an upload is received, a part is staged, or the commit is
        checked."""
        return self.state is SessionState.OPEN and self.pending == 0 and not self.streams

    def advance(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def add(self, staging: Staging, args: UpdateChunkArgs | UpdateWeightsArgs) -> ChunkReceipt:
        """Add one part to ``staging``, on the staging thread. Raises an error if the session has ended meanwhile."""
        receipt = staging.add(args.source, args.checksums, args.verify_checksum)
        self.tensors += receipt.tensors
        self.nbytes += receipt.nbytes
        return receipt

    def answer_commit(self, result: dict[str, Any], error: FastDeployError | None) -> None:
        """Answer the waiting commit call, if there is one."""
        answer, self.answer = self.answer, None
        if answer is not None:
            answer(result, error)

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

    def report(self, began: float, ended: float) -> dict[str, Any]:
        """Return the session's part of the report of its commit. began, ended: times of the swap."""
        seconds = {
            "stage": self.stage_s,
            "wait_for_step": began - self.ready_at,
            "commit": ended - began,
            "total": ended - self.started_at,
        }
        timings_ms = {name: round(value * 1000, 3) for name, value in seconds.items()}
        return {"session_id": self.id, "tensors": self.tensors, "nbytes": self.nbytes, "timings_ms": timings_ms}


class EndedSessions:
    """The latest MAX_REMEMBERED sessions that have ended, each with the error that later calls get."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, FastDeployError] = OrderedDict()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._errors

    def add(self, session: Session, error: FastDeployError) -> None:
        self._errors[session.id] = error
        if len(self._errors) > MAX_REMEMBERED:
            self._errors.popitem(last=False)

    def error(self, session_id: str) -> FastDeployError:
        """Return the error for a call that names a session that is not open."""
        return self._errors.get(session_id) or SessionNotFound(f"there is no weight session {session_id!r}")


def check_label(field: str, version: str | None) -> None:
    """Raise InvalidField unless ``version`` is None or can be a label of weights. The label must fit into messages."""
    if version is None:
        return
    if not 1 <= len(version) <= MAX_VERSION_CHARS:
        raise InvalidField(field, f"expected 1 to {MAX_VERSION_CHARS} characters, got {len(version)}")
    if version != version.encode("utf-8", "replace").decode():
        raise InvalidField(field, "expected text that UTF-8 can encode, got half of a surrogate pair")


def check_kv(kv: str | None) -> None:
    if kv not in (None, "keep", "recompute"):
        raise InvalidField("kv", f"expected keep or recompute, got {kv!r}")


def check_seconds(field: str, seconds: float) -> None:
    if not 0.0 < seconds <= MAX_SECONDS:
        raise InvalidField(field, f"expected seconds above 0 and at most {MAX_SECONDS:g}, got {seconds!r}")
