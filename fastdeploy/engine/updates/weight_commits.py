"""The end of a weight session: its last checks, and the swap between two steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, SessionNotFound
from fastdeploy.core.runner import Runner, Staged
from fastdeploy.engine.field_checks import check_result_is_named
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.engine.updates.weight_checks import UpdateChecks, check_result
from fastdeploy.engine.updates.weight_session import SessionBook, SessionEvent, SessionState, WeightSession
from fastdeploy.engine.updates.weight_switch import WeightSwitch
from fastdeploy.inter_communicator.messages import CommitUpdateArgs

log = logging.getLogger("fastdeploy.engine")

REPUBLISH_HOLD = "republish"


class WeightCommits:
    """The commits of weight sessions, and their preparation. end(session, error): ends a session without a commit.

    A prepared session has passed every check, and is committed whatever happens meanwhile, unless its lease ends or it
    is aborted. A new label of the weights that serve does not concern it: the weights are still those that the session
    was made for, since no other session can be open.

    last_commit_s: seconds of the last swap."""

    def __init__(
        self,
        runner: Runner,
        switch: WeightSwitch,
        pause: PauseState,
        checks: UpdateChecks,
        book: SessionBook,
        thread: StagingThread,
        clock: Callable[[], float],
        end: Callable[[WeightSession, FastDeployError], None],
    ):
        self._runner = runner
        self._switch = switch
        self._pause = pause
        self._checks = checks
        self._book = book
        self._thread = thread
        self._clock = clock
        self._end = end
        self.last_commit_s = 0.0

    def apply_fields(self, session: WeightSession, args: CommitUpdateArgs) -> None:
        """Check the fields of a commit against the weights that serve, and set them in the session. Raises an
        error, and changes nothing then."""
        fingerprint = args.fingerprint or session.fingerprint
        weight_epoch = session.weight_epoch if args.weight_epoch is None else args.weight_epoch
        self._checks.check_epoch(weight_epoch)
        if session.staged is None:
            check_result_is_named(session.begin.base, fingerprint)
            self._checks.check_serving(session.begin)
        else:
            check_result(fingerprint, session.staged)
        session.version = args.version or session.version
        session.kv = args.kv or session.kv
        session.fingerprint, session.weight_epoch = fingerprint, weight_epoch
        session.eos_token_ids = session.eos_token_ids if args.eos_token_ids is None else args.eos_token_ids

    def submit(
        self, session: WeightSession, work: Callable[[], Any], answer: Answer, reads: bool, prepare: bool = False
    ) -> None:
        """Let ``work`` finish the weights on the staging thread, and swap them in afterwards. prepare: wait for a
        commit with the swap. reads: whether ``work`` reads files."""
        session.advance(SessionEvent.COMMIT)
        session.answer = answer

        def on_finished(staged: Staged | None, error: FastDeployError | None, seconds: float) -> None:
            session.stage_s += seconds
            if session.state is SessionState.ENDED:
                return
            error = error or self._problem(session, staged)
            if error is not None or staged is None:
                self._end(session, error or EngineError("no result"))
            elif prepare:
                session.staged = staged
                session.advance(SessionEvent.PREPARE)
                self._answer_prepared(session)
            else:
                session.advance(SessionEvent.CHECKED)
                session.ready_at = self._clock()
                self._swap(session, staged)

        self._thread.submit(Job(session, work, on_finished, session.timeout_s, reads))

    def end_prepared(self, session: WeightSession, prepare: bool, answer: Answer) -> None:
        """Commit a prepared session; ``swap_prepared`` follows. prepare: only renew the lease."""
        session.answer = answer
        if prepare:
            self._answer_prepared(session)
        else:
            session.advance(SessionEvent.COMMIT)
            session.ready_at = self._clock()

    def swap_prepared(self, session: WeightSession) -> None:
        """Swap in the weights of a prepared session whose commit has come."""
        staged, session.staged = session.staged, None
        assert staged is not None
        self._swap(session, staged)

    def _answer_prepared(self, session: WeightSession) -> None:
        assert session.staged is not None
        session.renew(self._clock())
        result = {"session_id": session.id, "fingerprint": session.staged.fingerprint}
        session.answer_commit({**result, "eos_token_ids": session.staged.eos_token_ids}, None)

    def _problem(self, session: WeightSession, staged: Staged | None) -> FastDeployError | None:
        """Return why the weights may not serve: they are not those that the trainer named, or were made for other
        weights than those that serve."""
        try:
            if staged is not None:
                check_result(session.fingerprint, staged)
            self._checks.check_serving(session.begin)
            self._checks.check_epoch(session.weight_epoch)
        except FastDeployError as error:
            return error.with_traceback(None)  # the stack frames refer to the new weights
        return None

    def _swap(self, session: WeightSession, staged: Staged) -> None:
        """Swap in the new weights with their label and ``weight_epoch``."""
        began = self._clock()
        if session.eos_token_ids is not None:
            staged = staged._replace(eos_token_ids=session.eos_token_ids)
        report = self._switch.commit(staged, session.version, session.kv, session.weight_epoch)
        session.staging = None
        session.advance(SessionEvent.SWAP)
        self._book.end(SessionNotFound(f"weight session {session.id} was committed already"))
        self._pause.release_system_hold(REPUBLISH_HOLD)
        ended = self._clock()
        self.last_commit_s = ended - began
        session.answer_commit({**report, **session.report(began, ended), "state": self._pause.phase.value}, None)
        self.refresh_standby()

    def refresh_standby(self) -> None:
        """Bring the standby copy up to the weights that serve, beside steps. Later parts wait for that. After a failure
        the next update takes longer."""

        def on_refreshed(_: None, error: FastDeployError | None, seconds: float) -> None:
            if error is not None and not isinstance(error, EngineDead | EngineError):  # those end the engine
                log.warning("the standby copy is not up to date: %s", error)

        self._thread.submit(Job(None, self._runner.refresh_standby, on_refreshed, math.inf, reads=False))
