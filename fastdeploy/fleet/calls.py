"""How a fleet makes each control call.

| calls | rule | on each member |
|---|---|---|
| pause | undo | hold; a resume of it if another member refuses |
| resume, renew, reset, relabel, abort, unload, clear the cache | agree | the call itself |
| update, commit | commit | begin, part and check; then commit. Abort if another member refuses |
| begin, part | undo | the call itself; the end of the session if another member refuses |
| load an adapter | commit | load and check; then swap. Forget it if another member refuses |
| sleep, wake up | undo | the call itself; the opposite if another member refuses |
| all others | read | the call itself; the answers are merged |

Calls of holds are in pause_calls.py, and calls of weights in weight_calls.py. All others are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from fastdeploy.core.errors import FastDeployError, InvalidField, NotLeader, WeightUpdateRefused, WrongOrder
from fastdeploy.fleet.call import Context, FleetCall, bounded
from fastdeploy.fleet.pause_calls import PauseCall, PauseStatusCall, RenewCall, ResetCall, ResumeCall
from fastdeploy.fleet.reports import merge_metrics
from fastdeploy.fleet.state import FleetAdapter
from fastdeploy.fleet.transaction import Command, Rule
from fastdeploy.fleet.weight_calls import (
    AbortUpdateCall,
    BeginCall,
    CheckCall,
    CommitCall,
    PartCall,
    UpdateCall,
    WeightInfoCall,
)
from fastdeploy.inter_communicator import messages as m


class AgreeCall(FleetCall[m.Args]):
    """A call that every member can only do, such as clearing the cache."""

    rule = Rule.AGREE


class AbortCall(FleetCall[m.AbortArgs]):
    """A call to abort requests. A request counts as not found only if no member has it."""

    rule = Rule.AGREE

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        found = {request["request_id"] for request in report["aborted"]}
        report["not_found"] = [request_id for request_id in report["not_found"] if request_id not in found]
        return report


class SetVersionCall(FleetCall[m.SetVersionArgs]):
    """A call to give the weights that serve another label."""

    rule = Rule.AGREE

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        self.state.version, self.state.weight_epoch = report["version"], report["weight_epoch"]
        return report


class MetricsCall(FleetCall[m.MetricsArgs]):
    """The metrics of all members, each with the label of its replica."""

    def on_success(self) -> dict[str, Any]:
        return {"text": merge_metrics({name: result["text"] for name, result in self.results.items()})}


class FleetStateCall(FleetCall[m.FleetStateArgs]):
    """The states of all members, beside their merged state."""

    def on_success(self) -> dict[str, Any]:
        return super().on_success() | {"members": self.results}


# ---------------------------------------------------------------------- one member answers for all


class OneMemberCall(FleetCall[m.Args]):
    """A call that one member answers for all: the one that has been a member for the longest time."""

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        return names[:1]

    def on_success(self) -> dict[str, Any]:
        ((name, result),) = self.results.items()
        return result | {"replica": name}


class ExportCall(OneMemberCall):
    """A call to export the weights of one member: all have the same."""

    def work_s(self, command: Command) -> float:
        assert isinstance(self.args, m.ExportWeightsArgs)
        return bounded(self.args.timeout_s, self.config.stage_timeout_s)


class LookUpCall(OneMemberCall):
    """A question to one member: is there a folder of this name in the adapter root? A read that hangs must not cost a
    replica."""

    def work_s(self, command: Command) -> float:
        return self.config.stage_timeout_s


# ---------------------------------------------------------------------- adapters


class LoadCall(FleetCall[m.LoadAdapterArgs]):
    """A call to load and check an adapter on all members, and to swap it in on all afterwards, with one number. Each
    replica reads the source for itself, so a source that is changed meanwhile may give two adapters: such a load is
    refused."""

    rule = Rule.COMMIT

    def __init__(self, args: m.LoadAdapterArgs, context: Context):
        super().__init__(args, context)
        if args.prepare:
            raise InvalidField("prepare", "expected a whole load: the fleet makes both phases itself")
        self._entry: FleetAdapter | None = None
        self._fingerprint: str | None = None
        self._prepared: dict[str, str] = {}  # by replica, the fingerprint of what it has prepared

    def messages_to_prepare(self, name: str) -> list[m.Args]:
        return [replace(self.args, prepare=True, source=self.sources.get(name, self.args.source))]

    def message_to_commit(self, name: str) -> m.Args | None:
        if self._entry is None:
            assert self._fingerprint is not None, "a commit follows the preparation of all"
            epoch = self.state.next_adapter_epoch(self.args.lora_name)
            self._entry = FleetAdapter(self.args, epoch, self._fingerprint)
            self.state.adapter_calls.place(self.args.lora_name, self._entry)
        return m.EndLoadArgs(self.args.lora_name, True, self._entry.epoch, self._prepared[name])

    def message_to_undo(self, name: str) -> m.Args | None:
        """A replica that refused to prepare has no prepared load, or that of another call. After an unload, the load of
        a later call may be prepared."""
        if name not in self._prepared:
            return None
        return m.EndLoadArgs(self.args.lora_name, False, fingerprint=self._prepared[name])

    def work_s(self, command: Command) -> float:
        return bounded(self.args.timeout_s, self.config.stage_timeout_s) if command is Command.PREPARE else 0.0

    def on_result(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        if isinstance(args, m.LoadAdapterArgs):
            self._prepared[name] = result["fingerprint"]

    def disagreement(self, name: str, command: Command, result: dict[str, Any]) -> FastDeployError | None:
        """All replicas must have read the same adapter."""
        if command is not Command.PREPARE:
            return None
        self._fingerprint = self._fingerprint or result["fingerprint"]
        if result["fingerprint"] == self._fingerprint:
            return None
        why = f"{name} has read another adapter than the other replicas: the source was changed during the load"
        return WeightUpdateRefused(f"lora_name: {why}", param="lora_name")

    def on_success(self) -> dict[str, Any]:
        if self._entry is not None:
            self.state.adapter_calls.succeed(self.args.lora_name, self._entry)
        return super().on_success()

    def on_failure(self) -> None:
        """Take the adapter back, but not its number: a replica that was fenced may have served with it."""
        if self._entry is not None:
            self.state.raise_past_adapter_epoch(self._entry.epoch)
            self.state.adapter_calls.fail(self.args.lora_name, self._entry)


class UnloadCall(FleetCall[m.UnloadAdapterArgs]):
    """A call to remove an adapter name."""

    rule = Rule.AGREE

    def on_send(self) -> None:
        self.state.unload(self.args.lora_name)


# ---------------------------------------------------------------------- sleep and wake-up

S = TypeVar("S", bound=m.SleepArgs | m.WakeArgs)


class _MoveCall(FleetCall[S]):
    """A change of what sleeps. The gateway makes one at a time."""

    rule = Rule.UNDO

    def on_send(self) -> None:
        self._before = self.state.asleep

    def message_to_undo(self, name: str) -> m.Args | None:
        return None if name in self.errors else self._opposite(self.results[name]["asleep"])

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        """Return the call that takes the move back on a replica where ``asleep`` sleeps now."""
        raise AssertionError("each move has an opposite")

    def on_success(self) -> dict[str, Any]:
        report = super().on_success()
        self.state.asleep = tuple(report["asleep"])
        return report


class SleepCall(_MoveCall[m.SleepArgs]):
    """A call to send all members to sleep. If one refuses, those that sleep already are woken up."""

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        return m.WakeArgs(tuple(tag for tag in asleep if tag not in self._before))

    def work_s(self, command: Command) -> float:
        return self.config.stage_timeout_s if command is Command.ROLLBACK else bounded(self.args.timeout_s, 0.0)


class DiscardCall(SleepCall):
    """A call to send all members to sleep without their weights. Discarded weights do not come back, so a replica that
    refuses is fenced, and joins asleep."""

    rule = Rule.AGREE


class WakeCall(_MoveCall[m.WakeArgs]):
    """A call to wake all members up. If one refuses, those that woke up are sent to sleep again."""

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        return m.SleepArgs(tuple(tag for tag in self._before if tag not in asleep))

    def work_s(self, command: Command) -> float:
        return self.config.stage_timeout_s


# ---------------------------------------------------------------------- which call is made how


def _refuse_lead(args: m.LeadArgs, context: Context) -> FleetCall[Any]:
    raise NotLeader(f"this is the gateway of fleet {context.config.fleet_id!r}, which nobody leads but itself")


def _refuse_phase(args: m.EndLoadArgs, context: Context) -> FleetCall[Any]:
    raise WrongOrder(f"no load of adapter {args.lora_name!r} is prepared: the fleet makes both phases itself")


def _sleep(args: m.SleepArgs, context: Context) -> FleetCall[Any]:
    return (DiscardCall if args.discard else SleepCall)(args, context)


# The calls that a fleet makes in a way of their own. For all others, their declaration decides (see m.Args).
OWN_WAY: dict[type[m.Args], Callable[[Any, Context], FleetCall[Any]]] = {
    m.PauseArgs: PauseCall,
    m.ResumeArgs: ResumeCall,
    m.RenewArgs: RenewCall,
    m.PauseStatusArgs: PauseStatusCall,
    m.UpdateWeightsArgs: UpdateCall,
    m.BeginUpdateArgs: BeginCall,
    m.UpdatePartArgs: PartCall,
    m.CheckUpdateArgs: CheckCall,
    m.CommitUpdateArgs: CommitCall,
    m.AbortUpdateArgs: AbortUpdateCall,
    m.LoadAdapterArgs: LoadCall,
    m.LookUpAdapterArgs: LookUpCall,
    m.EndLoadArgs: _refuse_phase,
    m.UnloadAdapterArgs: UnloadCall,
    m.SetVersionArgs: SetVersionCall,
    m.ResetArgs: ResetCall,
    m.SleepArgs: _sleep,
    m.WakeArgs: WakeCall,
    m.AbortArgs: AbortCall,
    m.WeightInfoArgs: WeightInfoCall,
    m.MetricsArgs: MetricsCall,
    m.LeadArgs: _refuse_lead,
    m.FleetStateArgs: FleetStateCall,
    m.ExportWeightsArgs: ExportCall,
}


def call_for(args: m.Args, context: Context) -> FleetCall[Any]:
    """Return the way in which the fleet makes a call. Raises the error of a call that a fleet does not take."""
    if (own_way := OWN_WAY.get(type(args))) is not None:
        return own_way(args, context)
    if args.one_member:
        return OneMemberCall(args, context)
    return (FleetCall if args.reads else AgreeCall)(args, context)
