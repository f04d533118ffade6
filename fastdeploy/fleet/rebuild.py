"""The state of a fleet, built anew from the answers of its engines: for a gateway that starts, and that takes over from
one that has died. Nothing here talks to an engine.

A call that the dead gateway left half done ends like this. A pause that reached some engines stands on all. A commit
that reached some engines is made up for on the others, which join with the newer weights. A release that reached some
engines is made on all. A sleep that reached some, and is not done on all of these, is undone.

An engine that missed the last change of the fleet has no say about holds and adapters (messages.Call.change).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.served_weights import WHOLE_ENGINE, CommittedState
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.state import (
    REPUBLISH,
    TTL_MARGIN_S,
    FleetAdapter,
    FleetHold,
    FleetState,
    OverlappingCalls,
    stronger_terms,
)
from fastdeploy.inter_communicator.messages import LoadAdapterArgs, PauseArgs

StateReport = Mapping[str, Any]  # an answer to FleetStateArgs
SYSTEM = "system"  # placed_by of the engines' own holds


def new_fleet(fleet_id: str) -> str:
    """Return a new boot id of the fleet, which its engines keep. So it survives the gateway."""
    return f"{fleet_id}/{uuid.uuid4().hex[:12]}"


def fleet_of(fleet_id: str, reports: Sequence[StateReport]) -> str | None:
    """Return the boot id of the fleet that these engines belong to: that of the newest weights. None: no engine belongs
    to the fleet ``fleet_id``."""
    ours = [report for report in reports if report["fleet"].startswith(fleet_id + "/")]
    return max(ours, key=lambda report: (report["weight_epoch"], report["term"]))["fleet"] if ours else None


def reference(fleet: str, reports: Sequence[StateReport]) -> StateReport:
    """Return the answer of an engine that has the weights of the fleet: the newest ones among the engines that belonged
    to it. Among equals, the weights that most engines have, with what most of these have of all else that a commit
    sets."""
    ours = [report for report in reports if report["fleet"] == fleet] or list(reports)
    newest = max(report["weight_epoch"] for report in ours)
    candidates = [report for report in ours if report["weight_epoch"] == newest]
    fingerprints = Counter(report["fingerprint"] for report in candidates if report["fingerprint"] is not None)
    states = Counter(map(CommittedState.of, candidates))
    return max(candidates, key=lambda r: (fingerprints[r["fingerprint"]], states[CommittedState.of(r)]))


def rebuild(fleet: str, reports: Sequence[StateReport], now: float) -> FleetState:
    """Return the state of the fleet whose boot id is ``fleet``, from at least one report. The reports are from before
    the new gateway led, so "fleet" in them names the former fleet. now: on the clock of FleetHold.expires_at."""
    ours = [report for report in reports if report["fleet"] == fleet]
    serving = reference(fleet, reports)
    same = [r for r in ours or reports if r["weight_epoch"] == serving["weight_epoch"]]
    last = max(tuple(report["last_change"]) for report in same)
    current = [report for report in same if tuple(report["last_change"]) == last]
    slack_s = TTL_MARGIN_S if ours else 0.0  # without a gateway, nobody ended the holds but the engines
    holds: dict[tuple[str, str], FleetHold] = {}
    # An engine that lacks the last change was fenced, or had just joined. A hold that only such engines have was
    # released without them.
    for report in current:
        for hold in report["holds"]:
            if hold["placed_by"] != SYSTEM:
                _add_hold(holds, hold, now, slack_s)
    for hold in [hold for report in current for hold in report["holds"]]:
        if hold["placed_by"] == SYSTEM and hold["id"] == REPUBLISH:
            holds[WHOLE_ENGINE, REPUBLISH] = republish_hold()
    adapters = _adapters(current)
    return FleetState(
        **CommittedState.of(serving)._asdict(),
        hold_calls=OverlappingCalls(holds),
        adapter_calls=OverlappingCalls(adapters),
        past_adapter_epoch=_past_adapter_epoch(reports, adapters),
        boot_id=fleet,
        asleep=tuple(sorted(set.intersection(*(set(report["asleep"]) for report in current)))),
        changes=last[1],
    )


def republish_hold() -> FleetHold:
    """Return the hold of a fleet that has lost its weights. A commit of weights releases it, and so does a resume by
    its name."""
    args = PauseArgs(mode="keep", admission="hold", clear_cache=False, hold_id=REPUBLISH, placed_by=SYSTEM)
    return FleetHold(args)


def _add_hold(holds: dict[tuple[str, str], FleetHold], hold: StateReport, now: float, slack_s: float) -> None:
    """Add a hold of one engine. Of two holds of one name, the stronger terms and the later end are kept."""
    key, left_s = (hold["scope"], hold["id"]), hold["ttl_left_s"]
    args = PauseArgs(
        mode=hold["mode"],
        clear_cache=hold["clear_cache"],
        admission=hold["admission"],
        hold_id=hold["id"],
        placed_by=hold["placed_by"],
        scope=hold["scope"],
        anonymous=not hold["named"],
    )
    expires_at = None if left_s is None else now + max(left_s - slack_s, 0.0)
    if (other := holds.get(key)) is not None:
        args = stronger_terms(args, other.args)
        ends = (expires_at, other.expires_at)
        expires_at = None if None in ends else max(end for end in ends if end is not None)
    holds[key] = FleetHold(args, expires_at)


def _adapters(reports: Sequence[StateReport]) -> dict[str, FleetAdapter]:
    """Return the adapters that any engine has. Of several with one name, that with the highest epoch, and among equals
    that of most engines."""
    found = [adapter for report in reports for adapter in report["adapters"]]
    engines = Counter(map(_identity, found))
    adapters: dict[str, FleetAdapter] = {}
    for adapter in sorted(found, key=lambda a: (a["adapter_epoch"], engines[_identity(a)])):
        name, path = adapter["lora_name"], adapter["path"]
        args = LoadAdapterArgs(name, FolderSource(path), path=path, version=adapter["version"])
        adapters[name] = FleetAdapter(args, adapter["adapter_epoch"], adapter["fingerprint"])
    return adapters


def _identity(adapter: StateReport) -> tuple[Any, ...]:
    return adapter["lora_name"], adapter["adapter_epoch"], adapter["fingerprint"]


def _past_adapter_epoch(reports: Sequence[StateReport], adapters: Mapping[str, FleetAdapter]) -> int:
    """Return the highest number that any engine knows of an adapter which is not one of the fleet's ``adapters``."""
    ended = [report["past_adapter_epoch"] for report in reports]
    for adapter in [adapter for report in reports for adapter in report["adapters"]]:
        name, epoch = adapter["lora_name"], adapter["adapter_epoch"]
        if name not in adapters or adapters[name].epoch < epoch:
            ended.append(epoch)
    return max(ended)
