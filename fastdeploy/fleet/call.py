"""The base of all control calls of a fleet: the messages that a call needs on each replica, and what it means for the
state of the fleet."""

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
from fastdeploy.fleet.transaction import Command, Rule
from fastdeploy.inter_communicator import messages as m

A = TypeVar("A", bound=m.Args)


@dataclass(frozen=True)
class Context:
    """State and settings of the fleet, and the time on the event loop's clock when the call came. in_quorum: whether
    the replicas are members, which all have the state of the fleet."""

    state: FleetState
    config: FleetConfig
    now: float
    in_quorum: bool = True


class FleetCall(Generic[A]):
    """One control call over a fleet. ``rule`` says how it ends, see fleet/transaction.py. No method waits, sends or
    reads a clock: fleet/running_call.py does that.

    All calls of a gateway are sent to all members in one order. So a call that changes the state of the fleet does so
    when it is sent: that is the order in which the members see the calls.

    sources: replaces the source of ``args`` for replicas that cannot read it. errors:
    refusals of the commands PREPARE and COMMIT. results: the last results, of replicas that accepted. All three are by
    the replica's name."""

    rule: ClassVar[Rule] = Rule.READ

    def __init__(self, args: A, context: Context):
        self.args = args
        self.state = context.state
        self.config = context.config
        self.now = context.now
        self.in_quorum = context.in_quorum
        self.sources: dict[str, Source] = {}
        self.errors: dict[str, FastDeployError] = {}
        self.results: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------ messages

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        """Return the members that the call concerns. Raises the error of a call that cannot be made."""
        return names

    def messages_to_prepare(self, name: str) -> Sequence[m.Args]:
        """Return the first messages to a replica. It has accepted PREPARE if it accepts all of them."""
        return [self.args]

    def new_epoch(self) -> int | None:
        """Return the weight_epoch that the commit gives to new weights; None = it commits no weights."""
        return None

    def message_to_commit(self, name: str) -> m.Args | None:
        """Return the second message to a replica."""
        raise AssertionError("only calls with Rule.COMMIT commit")

    def message_to_undo(self, name: str) -> m.Args | None:
        """Return the message that undoes the call on a replica; None = there is nothing to undo."""
        return None

    def timeout_s(self, command: Command) -> float:
        """Return the time until the deadline of a command."""
        return self.config.fence_after_s + self.work_s(command)

    def work_s(self, command: Command) -> float:
        """Return the seconds that an engine may work on a command before it answers."""
        return 0.0

    # ------------------------------------------------------------------ answers

    def on_result(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        """Read the result of one accepted message, other than that of a rollback."""

    def disagreement(self, name: str, command: Command, result: dict[str, Any]) -> FastDeployError | None:
        """Return the error of a result that does not agree with those of other replicas; it counts as a refusal."""
        return None

    def is_done_already(self, error: FastDeployError) -> bool:
        """Return whether a refusal means that the replica already is as the call wants it. The call still fails if all
        replicas refuse it."""
        return False

    # ------------------------------------------------------------------ changes of the fleet's state

    def on_send(self) -> None:
        """Change the state as the call does. Called before the first message is sent."""

    def on_rollback(self) -> None:
        """Take the change back. Called before the first message of the rollback is sent."""

    def on_failure(self) -> None:
        """Take the change back, or what is left of it, since the call has failed on all members."""

    def on_success(self) -> dict[str, Any]:
        """Complete the change, and return the report. Raises the error of a call that every replica has refused."""
        return merge(list(self.results.values()))


def bounded(seconds: float | None, default: float) -> float:
    """Return a time-out of a call, or ``default`` if there is none or if the engine will refuse it."""
    return seconds if seconds is not None and 0.0 <= seconds <= MAX_TTL_S else default
