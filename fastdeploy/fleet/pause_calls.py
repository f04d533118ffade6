"""Calls of holds: pause, resume, renew and status."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

from msgspec.structs import replace

from fastdeploy.core.config import MAX_TTL_S
from fastdeploy.core.errors import PauseInterrupted, PauseTimeout
from fastdeploy.fleet.call import Context, FleetCall, bounded
from fastdeploy.fleet.state import MODES, TTL_MARGIN_S, FleetHold, FleetState, HoldKey, stronger_terms
from fastdeploy.fleet.transaction import Command, Rule
from fastdeploy.inter_communicator import messages as m

T = TypeVar("T", m.PauseArgs, m.RenewArgs)
R = TypeVar("R", bound=m.ResumeArgs | m.ResetArgs)
RELEASED = (PauseTimeout, PauseInterrupted)  # after these errors of an engine, its hold does not stand


def _for_engine(args: T) -> T:
    """Give the engine more time than the gateway has. A ttl that the engine must refuse stays as it is."""
    ttl_s = args.ttl_s
    return args if ttl_s is None or not 0.0 < ttl_s <= MAX_TTL_S else replace(args, ttl_s=ttl_s + TTL_MARGIN_S)


def _expiry(ttl_s: float | None, now: float) -> float | None:
    return None if ttl_s is None else now + ttl_s


def _show_ttl(hold: dict[str, Any], state: FleetState, now: float) -> None:
    """Show the ttl that the gateway counts."""
    standing = state.holds.get((hold["scope"], hold["id"]))
    left = None if standing is None or standing.expires_at is None else standing.expires_at - now
    hold["ttl_left_s"] = None if left is None else round(max(left, 0.0), 3)


class PauseCall(FleetCall[m.PauseArgs]):
    """A call to place a hold on all members, or on none. Anonymous holds get one name for the whole fleet.

    Pause calls on one hold may overlap, with resumes between them. The members see all of these in one order, so what
    stands at the end is what the last message in that order says. So a call that fails releases its hold only if no
    later call has placed it again. Such a later call then releases the hold if it fails too."""

    rule = Rule.UNDO

    def __init__(self, args: m.PauseArgs, context: Context):
        super().__init__(args, context)
        if args.hold_id is None:
            self.state.num_anonymous += 1
            hold_id = f"anonymous-{self.state.num_anonymous}-{uuid.uuid4().hex[:8]}"
            self.args = replace(args, hold_id=hold_id, anonymous=True)
        assert self.args.hold_id is not None
        self._key = (self.args.scope, self.args.hold_id)
        self._releases = False
        self._undone = False

    def on_send(self) -> None:
        below = self.state.holds.get(self._key)
        terms = replace(self.args, ttl_s=None)
        if below is not None and terms.mode.lower() in MODES:
            terms = stronger_terms(terms, below.args)
        self._hold = FleetHold(terms, _expiry(self.args.ttl_s, self.now), settled=False)
        self.state.hold_calls.place(self._key, self._hold)

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [_for_engine(self.args)]

    def message_to_undo(self, name: str) -> m.Args | None:
        return m.ResumeArgs(self.args.hold_id, self.args.scope) if self._releases else None

    def work_s(self, command: Command) -> float:
        drains = command is Command.PREPARE and self.args.mode.lower() == "wait"
        return bounded(self.args.timeout_s, 0.0) if drains else 0.0

    def on_rollback(self) -> None:
        self._undone = True
        calls, hold, standing = self.state.hold_calls, self._hold, self.state.holds.get(self._key)
        ended = any(isinstance(error, RELEASED) for error in self.errors.values())
        below = calls.before(self._key, hold)
        # A hold from before this call stays, if it was there for sure: then only its terms may differ.
        uneven = ended or hold.owed or (bool(self.results) and (below is None or not below.settled))
        if standing is not None and standing is not hold:
            standing.owed = standing.owed or uneven
            calls.fail(self._key, hold)
        elif uneven:
            self._releases = True
            calls.forget(self._key)
        elif self.results:
            self._settle()
        else:
            calls.fail(self._key, hold)

    def on_failure(self) -> None:
        if not self._undone:  # every member was lost
            self.state.hold_calls.fail(self._key, self._hold)

    def on_success(self) -> dict[str, Any]:
        self._settle()
        report = super().on_success()
        _show_ttl(report["hold"], self.state, self.now)
        return report

    def _settle(self) -> None:
        self._hold.settled = True
        self.state.hold_calls.succeed(self._key, self._hold)


class _ReleaseCall(FleetCall[R]):
    """A call that releases holds on all."""

    rule = Rule.AGREE

    def on_send(self) -> None:
        self._removals = self.state.hold_calls.remove(self._matches)

    def _matches(self, key: HoldKey, hold: FleetHold) -> bool:
        """Return whether the call releases a hold."""
        return hold.args.anonymous

    def on_success(self) -> dict[str, Any]:
        for key, removal in self._removals.items():
            self.state.hold_calls.succeed(key, removal)
        return super().on_success()

    def on_failure(self) -> None:
        for key, removal in self._removals.items():
            self.state.hold_calls.fail(key, removal)


class ResumeCall(_ReleaseCall[m.ResumeArgs]):
    """A call to release holds. The order of sending decides which pause calls it follows."""

    def _matches(self, key: HoldKey, hold: FleetHold) -> bool:
        hold_id = self.args.hold_id
        return key[0] == self.args.scope and (hold.args.anonymous if hold_id is None else key[1] == hold_id)


class RenewCall(FleetCall[m.RenewArgs]):
    """A call to set the ttl of a hold: that of the gateway, and the later one of the engines."""

    rule = Rule.AGREE

    def on_send(self) -> None:
        self._hold = self.state.holds.get((self.args.scope, self.args.hold_id))
        if self._hold is not None:
            self._before, self._hold.expires_at = self._hold.expires_at, _expiry(self.args.ttl_s, self.now)

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [_for_engine(self.args)]

    def on_failure(self) -> None:
        if self._hold is not None:
            self._hold.expires_at = self._before

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        _show_ttl(report["hold"], self.state, self.now)
        return report


class PauseStatusCall(FleetCall[m.PauseStatusArgs]):
    """A question for the pause status of all members."""

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        for hold in report["holds"]:
            _show_ttl(hold, self.state, self.now)
        return report


class ResetCall(_ReleaseCall[m.ResetArgs]):
    """A call to reset all members. Anonymous holds and open weight sessions end, and no adapter is left."""

    def on_send(self) -> None:
        super().on_send()
        for name in list(self.state.adapters):
            self.state.unload(name)
        self._sessions = [session for session in self.state.weight_sessions.values() if session.open]

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        report["sessions_aborted"] = [session.id for session in self._sessions if session.open]
        for session in self._sessions:
            self.state.close_weight_session(session)
        self.state.version = report["version"]
        return report
