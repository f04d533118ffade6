"""Calls of weights: updates in one call, and weight sessions over several calls."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from fastdeploy.core.errors import (
    FastDeployError,
    FleetCallFailed,
    InvalidField,
    SessionExpired,
    SessionNotFound,
    WeightUpdateRefused,
)
from fastdeploy.core.served_weights import WHOLE_ENGINE, CommittedState
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.call import Context, FleetCall, bounded
from fastdeploy.fleet.state import REPUBLISH, WeightSession
from fastdeploy.fleet.transaction import Command, Rule
from fastdeploy.inter_communicator import messages as m

LEASE_MARGIN_S = 10.0  # the gateway ends a silent session so long after the engines
KEEPS_SESSION = frozenset({"wrong_order", "invalid_field"})  # a refused part or commit with these ends no session
SessionArgs = m.UpdatePartArgs | m.CheckUpdateArgs | m.CommitUpdateArgs
A = TypeVar("A", bound=SessionArgs)


def new_session_id() -> str:
    return f"weights-{uuid.uuid4().hex[:12]}"


def replicas_of(session: WeightSession, names: Sequence[str]) -> Sequence[str]:
    """Return the replicas that take part in a session. All do as long as its begin is on the way."""
    if not session.begun:
        return names
    taking_part = [name for name in names if name in session.ids]
    if not taking_part:
        raise SessionNotFound(f"weight session {session.id} was lost with its replicas")
    return taking_part


class WeightSessionCall(FleetCall[A]):
    """A call that names a weight session, by the id of the fleet or by ``placed_by``. Each replica has its own id."""

    def __init__(self, args: A, context: Context):
        super().__init__(args, context)
        self.session = self.state.find_weight_session(args.session_id, args.placed_by)
        self._ids: dict[str, str] = {}

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        """The replicas that joined after the begin of the session do not take part."""
        if self.session is None:
            if self.args.session_id is not None:
                raise SessionNotFound(f"there is no weight session {self.args.session_id!r}")
            return names
        return replicas_of(self.session, names)

    def id_on(self, name: str) -> str | None:
        """Return the id of the session on a replica, as far as it is known."""
        known = self.session.ids if self.session is not None else {}
        return self._ids.get(name, known.get(name))

    def found(self) -> WeightSession | None:
        """Return the session that the replicas have found. The ids in their answers decide, because a call of
        ``placed_by`` may have been sent before the begin of its session was answered. Without an id in any answer: if
        the session that the call named has ended, this is a later one, whose begin was answered before this call."""
        by_ids = [self.state.weight_session_of(name, session_id) for name, session_id in self._ids.items()]
        if (found := next((session for session in by_ids if session is not None), None)) is not None:
            return found
        if self.session is None or self.session.open or self.args.session_id is not None:
            return self.session
        later = self.state.find_weight_session(None, self.args.placed_by)
        return later if later is not None and later.begun else self.session

    def on_result(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        if result.get("session_id") is not None:
            self._ids[name] = result["session_id"]

    def must_end(self) -> bool:
        """Return whether a refused call ends the session: not if it changed the session on no replica."""
        codes = {error.code for error in self.errors.values()}
        return bool(self.results) or len(codes) > 1 or not codes <= KEEPS_SESSION

    def on_rollback(self) -> None:
        self._aborts, self.session = self.must_end(), self.found()
        if self._aborts and self.session is not None:
            self.state.close_weight_session(self.session)

    def message_to_undo(self, name: str) -> m.Args | None:
        session_id = self.id_on(name)
        return m.AbortUpdateArgs(session_id) if self._aborts and session_id is not None else None

    def on_success(self) -> dict[str, Any]:
        self.session = self.found()
        report = super().on_success()
        if self.session is not None and report.get("session_id") is not None:
            report["session_id"] = self.session.id
        return report

    def stage_s(self) -> float:
        """Return the time in which the engines finish one job on new weights, or give it up."""
        timeout_s = self.session.begin.timeout_s if self.session is not None else None
        return bounded(timeout_s, self.config.stage_timeout_s)


class BeginCall(FleetCall[m.BeginUpdateArgs]):
    """A call to open a weight session on all members, or on none. A begin with the same key finds the same session on
    each replica."""

    rule = Rule.UNDO

    def on_send(self) -> None:
        key, sessions = self.args.idempotency_key, self.state.weight_sessions.values()
        same = [s for s in sessions if s.open and key is not None and s.begin.idempotency_key == key]
        self._is_new = not same
        self._expires_at = self.now + bounded(self.args.lease_s, 0.0) + LEASE_MARGIN_S
        self._session = same[0] if same else WeightSession(new_session_id(), self.args, {}, self._expires_at)
        if self._is_new:
            self.state.open_weight_session(self._session)

    def on_result(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        self._session.ids[name] = result["session_id"]

    def message_to_undo(self, name: str) -> m.Args | None:
        return m.AbortUpdateArgs(self.results[name]["session_id"]) if name in self.results else None

    def on_rollback(self) -> None:
        if self._is_new or self.results:
            self.state.close_weight_session(self._session)

    def on_failure(self) -> None:
        if self._is_new:
            self.state.close_weight_session(self._session)

    def on_success(self) -> dict[str, Any]:
        session = self._session
        session.begun = True
        session.ids = {name: session_id for name, session_id in session.ids.items() if name in self.results}
        session.expires_at = max(session.expires_at, self._expires_at)
        return super().on_success() | {"session_id": session.id}


class PartCall(WeightSessionCall[m.UpdatePartArgs]):
    """A call to add a part on all members. A part that a replica refuses ends the session on all."""

    rule = Rule.UNDO

    def on_send(self) -> None:
        if self.session is not None:
            session = self.session
            session.parts += 1
            session.source = self.args.source if isinstance(self.args.source, FolderSource) else None
            session.expires_at = max(
                session.expires_at, self.now + self.timeout_s(Command.PREPARE) + session.begin.lease_s
            )

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        session_id = self.id_on(name)
        return [replace(self.args, session_id=session_id, source=self.sources.get(name, self.args.source))]

    def work_s(self, command: Command) -> float:
        return self.stage_s() if command is Command.PREPARE else 0.0


class CheckCall(WeightSessionCall[m.CheckUpdateArgs]):
    """A question to all members: would they refuse an upload? It renews the lease of the upload's session."""

    def on_send(self) -> None:
        if (session := self.session) is not None:
            session.expires_at = max(session.expires_at, self.now + session.begin.lease_s + LEASE_MARGIN_S)

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [replace(self.args, session_id=self.id_on(name))]


class CommitCall(WeightSessionCall[m.CommitUpdateArgs]):
    """A call to check the new weights on all members, and to swap them in on all afterwards, with one number."""

    rule = Rule.COMMIT

    def __init__(self, args: m.CommitUpdateArgs, context: Context):
        super().__init__(args, context)
        if args.prepare:
            raise InvalidField("prepare", "expected a whole commit: the fleet makes both phases itself")
        self._epoch = args.weight_epoch
        self._agreed: dict[Command, Any] = {}

    def messages_to_prepare(self, name: str) -> Sequence[m.Args]:
        return [replace(self.args, session_id=self.id_on(name), prepare=True, weight_epoch=None)]

    def new_epoch(self) -> int:
        if self._epoch is None:
            self._epoch = self.state.next_epoch()
        return self._epoch

    def message_to_commit(self, name: str) -> m.Args | None:
        return replace(self.args, session_id=self.id_on(name), weight_epoch=self.new_epoch())

    def work_s(self, command: Command) -> float:
        return self.stage_s() if command is Command.PREPARE else 0.0

    def disagreement(self, name: str, command: Command, result: dict[str, Any]) -> FastDeployError | None:
        """All replicas must have the same new weights, with the same EOS ids."""
        if command is Command.ROLLBACK:
            return None
        label: Any = (result["fingerprint"], result["eos_token_ids"])  # as the source names them
        if command is Command.COMMIT:
            label = CommittedState.of(result)
        if self._agreed.setdefault(command, label) == label:
            return None
        why = f"the new weights on {name} are not those of other replicas: {label}, not {self._agreed[command]}"
        return WeightUpdateRefused(why)

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        state, session = self.state, self.session
        state.committed = CommittedState.of(report)
        state.last_epoch = max(state.last_epoch, state.weight_epoch)
        state.source = self.whole_source()
        state.hold_calls.forget((WHOLE_ENGINE, REPUBLISH))  # each engine has released it at the commit
        if session is not None:
            state.close_weight_session(session)
        return report

    def whole_source(self) -> FolderSource | None:
        """Return the source of all new weights, if there is one that may be read again."""
        session = self.session
        if session is None or session.begin.partial or session.begin.base is not None or session.parts != 1:
            return None
        return session.source if isinstance(session.source, FolderSource) else None


class UpdateCall(CommitCall):
    """An update in one call. Begin, part and check are sent at once: the part finds its session by ``placed_by``."""

    def __init__(self, args: m.UpdateWeightsArgs, context: Context):
        self._update = args
        self._placed_by = f"fleet-{uuid.uuid4().hex[:12]}"
        super().__init__(m.CommitUpdateArgs(None, placed_by=self._placed_by), context)

    def messages_to_prepare(self, name: str) -> Sequence[m.Args]:
        args = self._update
        begin = args.begin(self._placed_by)
        part = m.UpdatePartArgs(
            None,
            self.sources.get(name, args.source),
            checksums=args.checksums,
            verify_checksum=args.verify_checksum,
            placed_by=self._placed_by,
            form=args.form,
        )
        return [begin, part, replace(self.args, prepare=True)]

    def work_s(self, command: Command) -> float:
        jobs = 2 if command is Command.PREPARE else 0  # the part, and its check
        return jobs * bounded(self._update.timeout_s, self.config.stage_timeout_s)

    def must_end(self) -> bool:
        return True

    def on_success(self) -> dict[str, Any]:
        return super().on_success() | {"session_id": new_session_id()}

    def whole_source(self) -> FolderSource | None:
        args = self._update
        is_whole = isinstance(args.source, FolderSource) and not args.partial and args.base is None
        return args.source if is_whole and isinstance(args.source, FolderSource) else None


class AbortUpdateCall(FleetCall[m.AbortUpdateArgs]):
    """A call to end a weight session on all members. A replica that does not know the session has nothing to end."""

    rule = Rule.AGREE

    def __init__(self, args: m.AbortUpdateArgs, context: Context):
        super().__init__(args, context)
        self._session = self.state.weight_sessions.get(args.session_id) if args.session_id is not None else None

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        if self.args.session_id is None:
            return names
        if self._session is None:
            raise SessionNotFound(f"there is no weight session {self.args.session_id!r}")
        return replicas_of(self._session, names)

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [m.AbortUpdateArgs(self._session.ids[name] if self._session is not None else None)]

    def is_done_already(self, error: FastDeployError) -> bool:
        return isinstance(error, SessionNotFound | SessionExpired)

    def on_send(self) -> None:
        open_ones = [session for session in self.state.weight_sessions.values() if session.open]
        self._aborted = [session for session in open_ones if self._session in (None, session)]

    def on_success(self) -> dict[str, Any]:
        for session in self._aborted:
            self.state.close_weight_session(session)
        ended = any(result["aborted"] for result in self.results.values())
        return {"aborted": [session.id for session in self._aborted] if ended else []}


class WeightInfoCall(FleetCall[m.WeightInfoArgs]):
    """A question for the label and fingerprint of all members, and for the tensors of one. Equal fingerprints over all
    tensors show that those of the others are equal too, so the others need not tell them. Members that differ outside
    of a commit are an error, whose detail has "served": what each of them serves, by name."""

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        self._first = names[0]
        return names

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [self.args if name == self._first else m.WeightInfoArgs()]

    def work_s(self, command: Command) -> float:
        return self.config.stage_timeout_s if self.args.checksums else 0.0

    def on_success(self) -> dict[str, Any]:
        labels = {name: CommittedState.of(result) for name, result in self.results.items()}
        if len(set(labels.values())) > 1 and self.in_quorum and not self.state.changing:
            served = {name: label._asdict() for name, label in labels.items()}
            raise FleetCallFailed(f"the replicas do not serve the same weights: {labels}", served=served)
        report = super().on_success()
        if report["session"] is not None:
            found = [
                s for s in self.state.weight_sessions.values() if report["session"]["session_id"] in s.ids.values()
            ]
            report["session"] = report["session"] | {"session_id": found[0].id if found else None}
        return report
