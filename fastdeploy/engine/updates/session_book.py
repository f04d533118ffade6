"""The open weight session, and the errors that name the latest ended ones."""

from __future__ import annotations

from collections import OrderedDict

from fastdeploy.core.errors import FastDeployError, InvalidField, SessionNotFound, UpdateInProgress, WrongOrder
from fastdeploy.engine.updates.weight_session import Session, SessionState
from fastdeploy.inter_communicator.messages import BeginUpdateArgs, CheckUpdateArgs, CommitUpdateArgs, UpdateChunkArgs

MAX_REMEMBERED = 64


class EndedSessions:
    """The latest MAX_REMEMBERED sessions that have ended, each with the error that later calls get."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, FastDeployError] = OrderedDict()
        self._keys: dict[str, str] = {}  # session id by idempotency key

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._errors

    def add(self, session: Session, error: FastDeployError) -> None:
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
    """Finds the session that a call means. session: the open one, or None."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.ended = EndedSessions()

    def end(self, why: FastDeployError) -> None:
        """Close the open session. Later calls that name it get ``why``."""
        session, self.session = self.session, None
        assert session is not None
        self.ended.add(session, why)

    def meant(self, args: UpdateChunkArgs | CheckUpdateArgs | CommitUpdateArgs) -> str | None:
        """Return the session id in the call, or else the id of the open session if the same ``placed_by`` opened it."""
        session = self.session
        if args.session_id is not None or session is None or session.begin.placed_by != args.placed_by:
            return args.session_id
        return session.id

    def find_open(self, session_id: str) -> Session:
        """Return the session if it takes parts. Raises WrongOrder, or the error of its end."""
        session = self.find_for_commit(session_id)
        if session.state is SessionState.PREPARED:
            raise WrongOrder(f"weight session {session.id} is prepared: it takes a commit or an abort only")
        return session

    def find_for_commit(self, session_id: str) -> Session:
        """Return the session if it takes a commit. Raises WrongOrder, or the error of its end."""
        session = self.session
        if session is None or session.id != session_id:
            raise self.ended.error(session_id)
        if session.state not in (SessionState.OPEN, SessionState.PREPARED):
            raise WrongOrder(f"weight session {session.id} is being committed already")
        return session

    def find_begun(self, args: BeginUpdateArgs) -> Session | None:
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
