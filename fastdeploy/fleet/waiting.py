"""The meaning of control calls for requests that wait in the gateway, and that no replica knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.scope import WHOLE_ENGINE, adapter_scope
from fastdeploy.fleet.relay import Relay
from fastdeploy.inter_communicator import messages as m


@dataclass
class Ended:
    """The part of one request that a call has ended: numbers of choices, and of tokens of them that the client has."""

    choices: int = 0
    tokens: int = 0


def why_ended(args: m.Args, relay: Relay) -> str | None:
    """Return why ``args`` ends a request, in the engines' words; None = the request stays."""
    adapter = relay.request.adapter
    match args:
        case m.AbortArgs(request_ids=ids, lora_name=name, abort_all=everything):
            named = ids is not None and relay.client_id in ids
            return "aborted by request" if named or everything or (name is not None and name == adapter) else None
        case m.PauseArgs(mode=mode, scope=scope, hold_id=hold_id) if mode.lower() == "abort":
            is_covered = scope in (WHOLE_ENGINE, adapter_scope(adapter or None))
            why = "paused" if hold_id is None else f"paused by hold {hold_id!r}"
            return why if is_covered else None
        case m.SleepArgs(mode=mode) if mode.lower() == "abort":
            return "paused by hold 'sleep'"
        case m.ResetArgs():
            return "the trainer starts over (reset)"
    return None


def end_waiting(args: m.Args, relays: Collection[Relay]) -> dict[str, Ended]:
    """End what ``args`` ends of ``relays`` and what is at no replica. Return it by the ids that clients know. The parts
    must leave the dispatcher's queue beforehand, or before the event loop goes on."""
    ended: dict[str, Ended] = {}
    for relay in relays:
        if not relay.parts or (why := why_ended(args, relay)) is None:
            continue
        choices = [k for part in relay.parts for k in part.open_choices]
        relay.parts.clear()
        entry = ended.setdefault(relay.client_id, Ended())
        entry.choices += len(choices)
        entry.tokens += sum(len(relay.tokens[k]) for k in choices)
        relay.end(choices, why)
    return ended


def with_ended(args: m.Args, report: dict[str, Any], ended: dict[str, Ended]) -> dict[str, Any]:
    """Return the report of a call, with what has ended in the gateway."""
    if not ended:
        return report
    if isinstance(args, m.AbortArgs):
        return _with_aborts(report, ended)
    report = dict(report)
    if isinstance(args, m.ResetArgs):
        report["aborted"] += len(ended)
        return report
    if "aborted_ids" in report:
        report["aborted_ids"] = list(dict.fromkeys([*report["aborted_ids"], *ended]))
        aborted = report["counts"]["aborted"] + sum(entry.choices for entry in ended.values())
        report["counts"] = report["counts"] | {"aborted": aborted}
        report["tokens_returned"] += sum(entry.tokens for entry in ended.values())
    return report


def _with_aborts(report: dict[str, Any], ended: dict[str, Ended]) -> dict[str, Any]:
    known = {entry["request_id"]: entry for entry in report["aborted"]}
    for request_id, gone in ended.items():
        entry = known.setdefault(request_id, {"request_id": request_id, "output_token_count": 0})
        entry["output_token_count"] += gone.tokens
    not_found = [request_id for request_id in report["not_found"] if request_id not in known]
    return report | {"aborted": list(known.values()), "not_found": not_found}
