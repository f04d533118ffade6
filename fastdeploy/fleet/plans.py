"""The plan of every control call.

| calls | rule | on each member |
|---|---|---|
| pause | undo | hold; a resume of it if another member refuses |
| resume, renew, reset, relabel, abort, unload, clear the cache | agree | the call itself |
| update, commit | commit | begin, part and check; then commit. Abort if another member refuses |
| begin, part | undo | the call itself; the end of the session if another member refuses |
| load an adapter | commit | load and check; then swap. Forget it if another member refuses |
| sleep, wake up | undo | the call itself; the opposite if another member refuses |
| all others | read | the call itself; the answers are merged |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy.core.errors import NotLeader, WrongOrder
from fastdeploy.fleet.adapter_plans import DiscardPlan, LoadPlan, SleepPlan, UnloadPlan, WakePlan
from fastdeploy.fleet.pause_plans import PausePlan, PauseStatusPlan, RenewPlan, ResetPlan, ResumePlan
from fastdeploy.fleet.plan import Context, Plan, bounded
from fastdeploy.fleet.reports import merge, merge_metrics
from fastdeploy.fleet.transaction import Rule, Step
from fastdeploy.fleet.weight_plans import (
    AbortUpdatePlan,
    BeginPlan,
    CheckPlan,
    ChunkPlan,
    CommitPlan,
    UpdatePlan,
    WeightInfoPlan,
)
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.control_call import Access


class AgreePlan(Plan[m.Args]):
    """A call that every member can only do, such as clearing the cache."""

    rule = Rule.AGREE


class AbortPlan(Plan[m.AbortArgs]):
    """Abort requests. A request is not found only if no member has it."""

    rule = Rule.AGREE

    def done(self) -> dict[str, Any]:
        report = merge(list(self.results.values()))
        found = {request["request_id"] for request in report["aborted"]}
        report["not_found"] = [request_id for request_id in report["not_found"] if request_id not in found]
        return report


class SetVersionPlan(Plan[m.SetVersionArgs]):
    rule = Rule.AGREE

    def done(self) -> dict[str, Any]:
        report = merge(list(self.results.values()))
        self.state.version, self.state.weight_epoch = report["version"], report["weight_epoch"]
        return report


class MetricsPlan(Plan[m.MetricsArgs]):
    def done(self) -> dict[str, Any]:
        return {"text": merge_metrics({name: result["text"] for name, result in self.results.items()})}


class FleetStatePlan(Plan[m.FleetStateArgs]):
    """The states of all members, beside their merged state."""

    def done(self) -> dict[str, Any]:
        return merge(list(self.results.values())) | {"members": self.results}


class OneMemberPlan(Plan[m.Args]):
    """A call that one member answers for all: the one that has been a member for the longest time."""

    def participants(self, names: Sequence[str]) -> Sequence[str]:
        return names[:1]

    def seconds(self, step: Step) -> float:
        return self.config.fence_after_s

    def done(self) -> dict[str, Any]:
        ((name, result),) = self.results.items()
        return result | {"replica": name}


class ExportPlan(OneMemberPlan):
    """Export the weights of one member: all have the same."""

    def seconds(self, step: Step) -> float:
        assert isinstance(self.args, m.ExportWeightsArgs)
        return bounded(self.args.timeout_s, self.config.stage_timeout_s) + self.config.fence_after_s


class LookUpPlan(OneMemberPlan):
    """Ask one member for a folder in the adapter root. A read that hangs must not cost a replica."""

    def seconds(self, step: Step) -> float:
        return self.config.stage_timeout_s + self.config.fence_after_s


def _refuse_lead(args: m.LeadArgs, context: Context) -> Plan[Any]:
    raise NotLeader(f"this is the gateway of fleet {context.config.fleet_id!r}, which nobody leads but itself")


def _refuse_phase(args: m.EndLoadArgs, context: Context) -> Plan[Any]:
    raise WrongOrder(f"no load of adapter {args.lora_name!r} is prepared: the fleet makes both phases itself")


def _sleep(args: m.SleepArgs, context: Context) -> Plan[Any]:
    return (DiscardPlan if args.discard else SleepPlan)(args, context)


# Calls that a fleet makes in a way of their own. For all others, what they declare decides.
OWN: dict[type[m.Args], Callable[[Any, Context], Plan[Any]]] = {
    m.PauseArgs: PausePlan,
    m.ResumeArgs: ResumePlan,
    m.RenewArgs: RenewPlan,
    m.PauseStatusArgs: PauseStatusPlan,
    m.UpdateWeightsArgs: UpdatePlan,
    m.BeginUpdateArgs: BeginPlan,
    m.UpdateChunkArgs: ChunkPlan,
    m.CheckUpdateArgs: CheckPlan,
    m.CommitUpdateArgs: CommitPlan,
    m.AbortUpdateArgs: AbortUpdatePlan,
    m.LoadAdapterArgs: LoadPlan,
    m.LookUpAdapterArgs: LookUpPlan,
    m.EndLoadArgs: _refuse_phase,
    m.UnloadAdapterArgs: UnloadPlan,
    m.SetVersionArgs: SetVersionPlan,
    m.ResetArgs: ResetPlan,
    m.SleepArgs: _sleep,
    m.WakeArgs: WakePlan,
    m.AbortArgs: AbortPlan,
    m.WeightInfoArgs: WeightInfoPlan,
    m.MetricsArgs: MetricsPlan,
    m.LeadArgs: _refuse_lead,
    m.FleetStateArgs: FleetStatePlan,
    m.ExportWeightsArgs: ExportPlan,
}


def plan_for(args: m.Args, context: Context) -> Plan[Any]:
    """Return the plan of a call. Raises the error of a call that a fleet does not take."""
    if (own := OWN.get(type(args))) is not None:
        return own(args, context)
    if args.one_member:
        return OneMemberPlan(args, context)
    return (Plan if args.access is Access.READ else AgreePlan)(args, context)
