"""New weights, from the first byte to the commit: one session at a time, staged beside the serving weights.

    begin -> part ... -> (prepare ->) commit
          \\-> abort, a refused part, the end of the lease: the old weights stay, bit for bit

An update in one call does the same in one job. All code here runs on the loop's thread, except for the jobs of the
staging thread. New weights are swapped in between two steps: in ``poll``, or when a prepared session is committed.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Container
from typing import Any

from fastdeploy.core.errors import (
    FastDeployError,
    SessionExpired,
    SessionNotFound,
    WeightUpdateRefused,
    WrongOrder,
)
from fastdeploy.core.events import EventLog
from fastdeploy.core.request import Scope
from fastdeploy.core.runner import PartReceipt, Runner
from fastdeploy.core.weight_source import SourcePolicy
from fastdeploy.engine.field_checks import check_fingerprint, check_form, check_kv, check_label, check_result_is_named
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.holds import Admission, Mode
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.engine.updates.weight_checks import UpdateChecks
from fastdeploy.engine.updates.weight_commits import REPUBLISH_HOLD, WeightCommits
from fastdeploy.engine.updates.weight_session import SessionBook, SessionEvent, SessionState, WeightSession
from fastdeploy.engine.updates.weight_switch import WeightSwitch
from fastdeploy.inter_communicator import messages as m

log = logging.getLogger("fastdeploy.engine")

NO_WEIGHTS = "the engine has no complete weights until an update is committed"


class WeightSessions:
    """The updates of the base weights, one session at a time. pause: of the whole engine. wake: wakes the loop up.
    stage_timeout_s: seconds that a job of the staging thread may take, unless its session has another time-out.
    clients: those that are connected. events: gets the states of sessions.

    session: the open one, or None. num_failed: sessions that ended without a commit. last_commit_s: seconds of the last
    commit. thread: for the jobs on the weights, one at a time."""

    def __init__(
        self,
        runner: Runner,
        switch: WeightSwitch,
        pause: PauseState,
        policy: SourcePolicy,
        wake: Callable[[], None],
        clock: Callable[[], float],
        stage_timeout_s: float,
        clients: Container[str],
        events: EventLog,
    ):
        self._runner = runner
        self._pause = pause
        self._scope: Scope = pause.scope
        self._policy = policy
        self._checks = UpdateChecks(runner, pause.scope, stage_timeout_s)
        self._clock = clock
        self._stage_timeout_s = stage_timeout_s
        self._clients = clients
        self._events = events
        self.thread = StagingThread(wake, clock)
        self._book = SessionBook()
        self._commits = WeightCommits(runner, switch, pause, self._checks, self._book, self.thread, clock, self._end)
        self.num_failed = 0

    @property
    def session(self) -> WeightSession | None:
        return self._book.session

    @property
    def staging(self) -> bool:
        """True while weights of the open session are staged or checked."""
        return self.session is not None and self.thread.busy

    @property
    def last_commit_s(self) -> float:
        return self._commits.last_commit_s

    def hold_for_republish(self, locked: str = "") -> None:
        """Hold the whole engine until weights are committed. locked: see Hold."""
        self._pause.place_system_hold(REPUBLISH_HOLD, Mode.KEEP, Admission.HOLD, locked)

    # ------------------------------------------------------------------ calls

    @handles(m.BeginUpdateArgs)
    def begin(self, args: m.BeginUpdateArgs, client: str) -> dict[str, Any]:
        """Open a session, or find the one that a begin with the same key has opened. Raises UpdateInProgress,
        VersionConflict, BaseMismatch, WrongOrder or InvalidField, or the error that ended the session of the key."""
        session = self._book.find_begun(args) or self._open(args, client if args.ends_with_client else None)
        session.renew(self._clock())
        return {"session_id": session.id, **session.opened}

    @handles(m.UpdatePartArgs)
    def add_part(self, args: m.UpdatePartArgs, answer: Answer) -> None:
        session_id = self._book.id_in(args)
        if session_id is None:
            answer({"session_id": None}, None)
            return
        session = self._book.find_open(session_id)
        self._check_source(args)
        check_form(args.form, session.begin.base)
        check_label("version", args.version)
        session.advance(SessionEvent.PART)
        session.version = args.version or session.version
        self._submit_part(session, args, answer)

    @handles(m.CheckUpdateArgs)
    def check(self, args: m.CheckUpdateArgs) -> dict[str, Any]:
        """Raise the error that a part, or a begin with ``args.begin``, would raise. Renew the lease of the session."""
        session_id = self._book.id_in(args)
        if session_id is not None:
            session = self._book.find_open(session_id)
            check_form(args.form, session.begin.base)
            session.renew(self._clock())
            return {"session_id": session_id, "lease_s": session.begin.lease_s}
        self._check_begin(args.begin)
        check_result_is_named(args.begin.base, args.begin.fingerprint)
        check_form(args.form, args.begin.base)
        return {"session_id": None}

    @handles(m.CommitUpdateArgs)
    def commit(self, args: m.CommitUpdateArgs, answer: Answer) -> None:
        """Commit or prepare a session, see messages.CommitUpdateArgs. A bad field leaves the session as it was."""
        session_id = self._book.id_in(args)
        if session_id is None:
            raise WrongOrder("no weight session is open: none was begun, or the last one failed or lost its lease")
        session = self._book.find_for_commit(session_id)
        check_label("version", args.version)
        check_kv(args.kv)
        check_fingerprint("fingerprint", args.fingerprint)
        self._commits.apply_fields(session, args)
        if session.state is SessionState.PREPARED:
            self._commits.end_prepared(session, args.prepare, answer)
        else:
            self._commits.submit(session, session.open_staging.finish, answer, reads=False, prepare=args.prepare)

    @handles(m.UpdateWeightsArgs)
    def update(self, args: m.UpdateWeightsArgs, answer: Answer) -> None:
        """Begin a session, stage one part and commit, in one call."""
        self._check_source(args)
        check_form(args.form, args.base)
        check_result_is_named(args.base, args.fingerprint)
        session = self._open(args.begin())
        staging = session.open_staging

        def work() -> Any:
            session.add(staging, args)
            return staging.finish()

        self._commits.submit(session, work, answer, reads=args.source.may_hang)

    @handles(m.AbortUpdateArgs)
    def abort(self, args: m.AbortUpdateArgs) -> dict[str, Any]:
        """End the session that the call names, or else the open one. A session that has ended already is no error."""
        session = self.session
        if args.session_id is not None and (session is None or session.id != args.session_id):
            if args.session_id in self._book.ended:
                return {"aborted": []}
            raise self._book.ended.error(args.session_id)
        if session is None:
            return {"aborted": []}
        self._end(session, SessionNotFound(f"weight session {session.id} was aborted"))
        return {"aborted": [session.id]}

    def describe_session(self) -> dict[str, Any] | None:
        """Return a description of the open session, if there is one."""
        return self.session.describe(self._clock()) if self.session is not None else None

    # ------------------------------------------------------------------ between two steps

    def poll(self) -> None:
        """Handle the results of the staging thread, and end a session whose lease or whose client has ended."""
        self.thread.poll()
        self._drop_lost_clients()
        session = self.session
        if session is not None and session.lease_runs and session.expires_at <= self._clock():
            missing = "commit" if session.state is SessionState.PREPARED else "part"
            why = f"the lease of weight session {session.id} ended: no {missing} came for {session.begin.lease_s:g} s"
            log.warning("%s", why)
            self._end(session, SessionExpired(f"{why}; the old weights still serve"))

    def next_deadline(self) -> float | None:
        """Time at which ``poll`` must be called even if no message comes."""
        session = self.session
        of_lease = session.expires_at if session is not None and session.lease_runs else None
        return min((due for due in (of_lease, self.thread.next_deadline()) if due is not None), default=None)

    def swap_prepared(self) -> None:
        """Swap in the weights of a prepared session that was committed. The loop calls this function after each
        message, so that every engine of a fleet handles a commit and the messages behind it in the same order."""
        if self.session is not None and self.session.state is SessionState.READY:
            self._commits.swap_prepared(self.session)

    def refresh_standby(self) -> None:
        """See ``WeightCommits.refresh_standby``."""
        self._commits.refresh_standby()

    def drop_session(self, why: str) -> list[str]:
        """End the open session, if there is one. Return the ids of ended sessions."""
        session = self.session
        if session is None:
            return []
        self._end(session, SessionNotFound(f"weight session {session.id}: {why}"))
        return [session.id]

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting call with ``error``, when the engine ends."""
        session, self._book.session = self.session, None
        if session is not None and session.state is not SessionState.ENDED:
            session.advance(SessionEvent.END)
            session.answer_commit({}, error)
        self.thread.close(error)

    # ------------------------------------------------------------------ inside

    def _check_source(self, args: m.UpdatePartArgs | m.UpdateWeightsArgs) -> None:
        self._policy.check(args.source)
        if args.source.may_hang:
            self.thread.check_room()

    def _check_begin(self, args: m.BeginUpdateArgs) -> float:
        """Raise an error if no session can begin with ``args`` now. Returns the session's ``timeout_s``."""
        timeout_s = self._checks.check_fields(args)
        self._book.check_free(args, self._clock())
        self._checks.check_state(args)
        return timeout_s

    def _drop_lost_clients(self) -> None:
        session = self.session
        if session is None or session.state is not SessionState.OPEN:
            return
        if session.owner is not None and session.owner not in self._clients:
            self._end(session, SessionNotFound(f"weight session {session.id}: its API server is gone"))

    def _open(self, args: m.BeginUpdateArgs, owner: str | None = None) -> WeightSession:
        timeout_s = self._check_begin(args)
        info = self._runner.info
        facts: dict[str, Any] = {"fingerprint": self._runner.fingerprint, "dtype": info.dtype}
        facts |= {"ignored_tensors": info.ignored_tensors, "stacks_experts": info.stacks_experts}
        opened = {"lease_s": args.lease_s, **self._scope.weights_label(), **facts}
        staging = self._runner.begin_update(args.partial, delta=args.base is not None)
        self._book.session = session = WeightSession(
            id=f"weights-{uuid.uuid4().hex[:12]}",
            begin=args,
            opened=opened,
            timeout_s=timeout_s,
            staging=staging,
            owner=owner,
            events=self._events,
            started_at=self._clock(),
        )
        return session

    def _submit_part(self, session: WeightSession, args: m.UpdatePartArgs, answer: Answer) -> None:
        session.pending += 1

        def on_read(receipt: PartReceipt | None, error: FastDeployError | None, seconds: float) -> None:
            session.pending -= 1
            session.stage_s += seconds
            session.renew(self._clock())
            if session.state is SessionState.ENDED:
                error = error or self._book.ended.error(session.id)
            elif isinstance(error, WeightUpdateRefused):
                why = f"weight session {session.id} ended because a part was refused: {error.message}"
                self._end(session, SessionNotFound(why))
            elif error is not None:
                self._end(session, error)
            if error is not None or receipt is None:
                answer(self._scope.weights_label(), error)
                return
            answer(
                {
                    "session_id": session.id,
                    "tensors": receipt.tensors,
                    "nbytes": receipt.nbytes,
                    "tensors_received": session.tensors,
                    "lease_s": session.begin.lease_s,
                    "stage_ms": round(seconds * 1000, 3),
                },
                None,
            )

        work = functools.partial(session.add, session.open_staging, args)
        self.thread.submit(Job(session, work, on_read, session.timeout_s, reads=args.source.may_hang))

    def _end(self, session: WeightSession, why: FastDeployError) -> None:
        """End a session without a commit. The old weights stay. A running job of the session is abandoned, because it
        may hang."""
        session.advance(SessionEvent.END)
        self._book.end(why)
        self.num_failed += 1
        self.thread.give_up(session, why)
        session.answer_commit(self._scope.weights_label(), why)
        staging, session.staging, session.staged = session.open_staging, None, None

        def on_freed(_: None, error: FastDeployError | None, seconds: float) -> None:
            if error is not None:
                log.error("staged weights could not be freed: %s", error)

        self.thread.submit(Job(session, staging.abandon, on_freed, self._stage_timeout_s, reads=False))
