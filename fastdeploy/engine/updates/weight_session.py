"""One weight session: its states as a table, and its data. ``weights.py`` runs the session."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.runner import ChunkReceipt, Staged, Staging
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.updates.weight_streams import WeightStreams, may_stream
from fastdeploy.inter_communicator.messages import BeginUpdateArgs, UpdateChunkArgs, UpdateWeightsArgs


class SessionState(Enum):
    OPEN = "open"  # accepts parts
    COMMITTING = "committing"  # accepts no more parts; the staging thread checks that all tensors are there
    PREPARED = "prepared"  # complete and checked; takes a commit or an abort
    READY = "ready"  # complete, and about to be swapped in
    ENDED = "ended"


class SessionEvent(Enum):
    PART = "part"
    COMMIT = "commit"
    CHECKED = "checked"
    PREPARE = "prepare"  # checked, for a commit that comes later
    SWAP = "swap"
    END = "end"  # aborted, refused, or the lease ended: the old weights stay


# An event that is not listed is our own mistake and raises KeyError.
TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.OPEN, SessionEvent.PART): SessionState.OPEN,
    (SessionState.OPEN, SessionEvent.COMMIT): SessionState.COMMITTING,
    (SessionState.COMMITTING, SessionEvent.CHECKED): SessionState.READY,
    (SessionState.COMMITTING, SessionEvent.PREPARE): SessionState.PREPARED,
    (SessionState.PREPARED, SessionEvent.COMMIT): SessionState.READY,
    (SessionState.READY, SessionEvent.SWAP): SessionState.ENDED,
    (SessionState.OPEN, SessionEvent.END): SessionState.ENDED,
    (SessionState.COMMITTING, SessionEvent.END): SessionState.ENDED,
    (SessionState.PREPARED, SessionEvent.END): SessionState.ENDED,
    (SessionState.READY, SessionEvent.END): SessionState.ENDED,
}


@dataclass
class Session:
    """One update of weights. begin: the call that opened it. opened: the reply to it, without "session_id".

    version, kv, fingerprint: of begin, until a later call replaces them. weight_epoch, eos_token_ids: that a commit has
    asked for.
    staging: None when the session has ended. staged: the weights of a session that is PREPARED or READY.
    owner: the session ends with the connection of this client, while it waits for parts. streams: uploads that are
    being received. pending: parts without an answer yet. tensors, nbytes: received so far. stage_s: seconds that the
    staging thread has worked. answer: of the commit call. events: gets every change of the state. Times are on the
    loop's clock.
    """

    id: str
    begin: BeginUpdateArgs
    opened: dict[str, Any]
    timeout_s: float
    staging: Staging | None
    started_at: float
    owner: str | None
    version: str | None = field(init=False)
    kv: str = field(init=False)
    fingerprint: str | None = field(init=False)
    expires_at: float = field(init=False)
    streams: WeightStreams = field(init=False)
    state: SessionState = SessionState.OPEN
    pending: int = 0
    tensors: int = 0
    nbytes: int = 0
    stage_s: float = 0.0
    ready_at: float = 0.0
    weight_epoch: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    staged: Staged | None = None
    answer: Answer | None = None
    events: EventLog = field(default_factory=EventLog)

    def __post_init__(self) -> None:
        self.version, self.kv, self.fingerprint = self.begin.version, self.begin.kv, self.begin.fingerprint
        self.streams = WeightStreams(may_stream(self.begin))
        self.renew(self.started_at)
        self._tell("begin")

    def renew(self, now: float) -> None:
        """Let the lease end ``lease_s`` seconds from now."""
        self.expires_at = now + self.begin.lease_s

    @property
    def open_staging(self) -> Staging:
        """The staging of a session that has not ended."""
        assert self.staging is not None
        return self.staging

    @property
    def lease_runs(self) -> bool:
        """True if the lease may end. It does not end while an upload is received, a part is staged, or the commit is
        checked."""
        if self.state is SessionState.PREPARED:
            return True
        return self.state is SessionState.OPEN and self.pending == 0 and not self.streams

    def advance(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
        self._tell(event.value)

    def _tell(self, event: str) -> None:
        if self.events.watched:
            fields = {"state": self.state.value, "event": event, "version": self.version, "nbytes": self.nbytes}
            self.events.add(EventKind.SESSION, self.id, **fields)

    def add(self, staging: Staging, args: UpdateChunkArgs | UpdateWeightsArgs) -> ChunkReceipt:
        """Add one part to ``staging``, on the staging thread. Raises an error if the session has ended meanwhile."""
        receipt = staging.add(args.source, args.checksums, args.verify_checksum, args.form)
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
            "placed_by": self.begin.placed_by,
            "version": self.version,
            "partial": self.begin.partial,
            "in_place": self.begin.in_place,
            "delta": self.begin.base is not None,
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
