"""The base of all plans: the messages that a control call needs on each replica, and what it means for the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fastdeploy.core.config import MAX_TTL_S
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.weight_source import Source
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.reports import merge
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.transaction import Rule, Step
from fastdeploy.inter_communicator import messages as m

A = TypeVar("A", bound=m.Args)


@dataclass(frozen=True)
class Context:
    """State and settings of the fleet, and the time on the event loop's clock when the call came. in_quorum: the
    replicas are members, so all have the state of the fleet."""

    state: FleetState
    config: FleetConfig
    now: float
    in_quorum: bool = True


class Plan(Generic[A]):
    """One control call. ``rule`` says how it ends, see fleet/transaction.py. No method waits, sends or reads a clock.

    All calls of a gateway are sent to all members in one order. So a plan that changes the state of the fleet does so
    when its message is sent: that is the order in which the members see the calls.

    sources: replaces the source of ``args`` for replicas that cannot read it. errors: refusals of ``prepare`` and of
    ``commit``. results: the last results, of replicas that accepted. Both are by the replica's name."""

    rule: ClassVar[Rule] = Rule.READ

    def __init__(self, args: A, context: Context):
        self.args = args
        self.state = context.state
        self.config = context.config
        self.now = context.now
        self.in_quorum = context.in_quorum
        self.order = 0
        self.sources: dict[str, Source] = {}
        self.errors: dict[str, FastDeployError] = {}
        self.results: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------ messages

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        """Return the members that the call concerns. Raises the error of a call that cannot be made."""
        return names

    def begin(self) -> None:
        """Note in the fleet's state that the call is being sent."""

    def prepare(self, name: str) -> Sequence[m.Args]:
        """Return the first messages to a replica. The step is accepted if all of them are."""
        return [self.args]

    def commit(self, name: str) -> m.Args | None:
        """Return the second message to a replica."""
        raise AssertionError("only plans with Rule.COMMIT commit")

    def rollback(self, name: str) -> m.Args | None:
        """Return the message that undoes the call on a replica; None = there is nothing to undo."""
        return None

    def seconds(self, step: Step) -> float:
        """Return the time until the deadline of a step."""
        return self.config.fence_after_s

    # ------------------------------------------------------------------ answers

    def heard(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        """Note the result of one accepted message, other than that of a rollback."""

    def judge(self, name: str, step: Step, result: dict[str, Any]) -> FastDeployError | None:
        """Return the error of a result that does not agree with those of other replicas; it counts as a refusal."""
        return None

    def forgives(self, error: FastDeployError) -> bool:
        """Return whether a refusal means that the replica already is as the call wants it. The call still fails if all
        replicas refuse it."""
        return False

    def rolling_back(self) -> None:
        """Note in the fleet's state that the rollback is being sent."""

    # ------------------------------------------------------------------ end

    def done(self) -> dict[str, Any]:
        """Note in the fleet's state that the call has succeeded, and return its report. Raises the error of a call that
        every replica has refused."""
        return merge(list(self.results.values()))

    def failed(self) -> None:
        """Note in the fleet's state that the call has failed, on all members."""


def bounded(seconds: float | None, default: float) -> float:
    """Return a time-out of a call, or ``default`` if there is none or if the engine will refuse it."""
    return seconds if seconds is not None and 0.0 <= seconds <= MAX_TTL_S else default
