"""Weight sessions: the states of one as a table, its data, and the book that finds it. ``weights.py`` runs it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fastdeploy.core.errors import FastDeployError, InvalidField, SessionNotFound, UpdateInProgress, WrongOrder
from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.runner import PartReceipt, Staged, Staging
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.inter_communicator.messages import (
    BeginUpdateArgs,
    CheckUpdateArgs,
    CommitUpdateArgs,
    UpdatePartArgs,
    UpdateWeightsArgs,
)


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


MAX_REMEMBERED = 64  # sessions that have ended
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
class WeightSession:
    """One update of weights. begin: the call that opened it. opened: the reply to it, without "session_id".

    version, kv, fingerprint: of begin, until a later call replaces them. weight_epoch, eos_token_ids: those that a
    commit has asked for.
    staging: None when the session has ended. staged: the weights of a session that is PREPARED or READY.
    owner: the session ends with the connection of this client, while it waits for parts. pending: parts without an
    answer yet. tensors, nbytes: received so far. stage_s: seconds that the staging thread has worked. answer: of the
    commit call. events: gets every change of the state. Times are on the loop's clock.
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
        """True if the lease may end. It does not end while a part is staged, or the commit is checked."""
        if self.state is SessionState.PREPARED:
            return True
        return self.state is SessionState.OPEN and self.pending == 0

    def advance(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
        self._tell(event.value)

    def _tell(self, event: str) -> None:
        if self.events.watched:
            fields = {"state": self.state.value, "event": event, "version": self.version, "nbytes": self.nbytes}
            self.events.add(EventKind.SESSION, self.id, **fields)

    def add(self, staging: Staging, args: UpdatePartArgs | UpdateWeightsArgs) -> PartReceipt:
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


class EndedSessions:
    """The latest MAX_REMEMBERED sessions that have ended, each with the error that later calls get."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, FastDeployError] = OrderedDict()
        self._keys: dict[str, str] = {}  # session id by idempotency key

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._errors

    def add(self, session: WeightSession, error: FastDeployError) -> None:
        self._errors[session.id] = error
        if session.begin.idempotency_key is not None:
            self._keys[session.begin.idempotency_key] = session.id
        if len(self._errors) > MAX_REMEMBERED:
            self._errors.popitem(last=False)
            self._keys = {key: session_id for key, session_id in self._keys.items() if session_id in self._errors}

    def error(self, session_id: str) -> FastDeployError:
        """Return the error for a call that names a session that is not open. The error refers to no stack frame of an
        earlier call that it was raised in."""
        error = self._errors.get(session_id)
        if error is None:
            return SessionNotFound(f"there is no weight session {session_id!r}")
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

    def check_key(self, idempotency_key: str | None) -> None:
        """Raise the error for a begin whose session has ended already."""
        if idempotency_key in self._keys:
            raise self.error(self._keys[idempotency_key])


class SessionBook:
    """The open session, or None, and the latest ones that have ended."""

    def __init__(self) -> None:
        self.session: WeightSession | None = None
        self.ended = EndedSessions()

    def end(self, why: FastDeployError) -> None:
        """Close the open session. Later calls that name it get ``why``."""
        session, self.session = self.session, None
        assert session is not None
        self.ended.add(session, why)

    def id_in(self, args: UpdatePartArgs | CheckUpdateArgs | CommitUpdateArgs) -> str | None:
        """Return the session id in the call, or else the id of the open session if the same ``placed_by`` opened it."""
        session = self.session
        if args.session_id is not None or session is None or session.begin.placed_by != args.placed_by:
            return args.session_id
        return session.id

    def find_open(self, session_id: str) -> WeightSession:
        """Return the session if it takes parts. Raises WrongOrder, or the error of its end."""
        session = self.find_for_commit(session_id)
        if session.state is SessionState.PREPARED:
            raise WrongOrder(f"weight session {session.id} is prepared: it takes a commit or an abort only")
        return session

    def find_for_commit(self, session_id: str) -> WeightSession:
        """Return the session if it takes a commit. Raises WrongOrder, or the error of its end."""
        session = self.session
        if session is None or session.id != session_id:
            raise self.ended.error(session_id)
        if session.state not in (SessionState.OPEN, SessionState.PREPARED):
            raise WrongOrder(f"weight session {session.id} is being committed already")
        return session

    def find_begun(self, args: BeginUpdateArgs) -> WeightSession | None:
        """Return the open session if a begin with the same key has opened it. Raises InvalidField if that begin had
        other fields."""
        session, key = self.session, args.idempotency_key
        if session is None or key is None or key != session.begin.idempotency_key:
            return None
        if args != session.begin:
            raise InvalidField("idempotency_key", "expected a new key: a begin with other fields has used this one")
        return session

    def check_free(self, args: BeginUpdateArgs, now: float) -> None:
        """Raise UpdateInProgress if a session is open, and the error of its end if the session of the key has ended."""
        self.ended.check_key(args.idempotency_key)
        if self.session is not None:
            owner, age = self.session.begin.placed_by, now - self.session.started_at
            raise UpdateInProgress(f"{owner} opened a weight session {age:.1f} s ago; try again when it has ended")
