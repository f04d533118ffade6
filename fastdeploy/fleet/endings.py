"""The meaning of control calls for requests that no replica can end: they wait in the gateway, or their replica is lost
before it has sent their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.outputs import ADAPTER_UNLOADED
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.served_weights import WHOLE_ENGINE, adapter_scope
from fastdeploy.inter_communicator import messages as m

ENDS = (m.AbortArgs, m.PauseArgs, m.SleepArgs, m.ResetArgs, m.UnloadAdapterArgs)


@dataclass
class Ended:
    """How many choices of one request a call has ended, and how many tokens of them the client has."""

    choices: int = 0
    tokens: int = 0


class EndingCall:
    """A control call that ends requests. Each of these requests has it in ``Relay.endings`` from the moment in which
    the call is sent. The engines end the requests that run there (after an unload these may finish). The gateway ends
    the requests that are at no replica, and those that lose their replica later: nobody knows whether its engine has
    ended them.

    ended: the requests that the gateway has ended, by the ids that clients know. failed: the call has failed, so the
    requests that have not ended go on."""

    def __init__(self, args: m.Args):
        self.ended: dict[str, Ended] = {}
        self.failed = False
        self._args = args

    def why(self, request: AddRequest) -> str | None:
        """Return why this call ends a request, in the engines' words; None = the request stays."""
        adapter, survives = request.adapter, request.survives_aborts
        match self._args:
            case m.AbortArgs(request_ids=ids, lora_name=name, abort_all=everything, session=session):
                named = ids is not None and (request.group or request.request_id) in ids
                named |= session is not None and session == request.session
                is_one_of_all = everything or (name is not None and name == adapter)
                return "aborted by request" if named or (is_one_of_all and not survives) else None
            case m.UnloadAdapterArgs(lora_name=name) if name == adapter:
                return f"adapter {name!r} was unloaded, and no replica that still has it runs the request"
            case _ if survives and not (isinstance(self._args, m.ResetArgs) and adapter):  # a reset unloads adapters
                return None
            case m.PauseArgs(mode=mode, scope=scope, hold_id=hold_id) if mode.lower() == "abort":
                is_covered = scope in (WHOLE_ENGINE, adapter_scope(adapter or None))
                why = "paused" if hold_id is None else f"paused by hold {hold_id!r}"
                return why if is_covered else None
            case m.SleepArgs(mode=mode) if mode.lower() == "abort":
                return "paused by hold 'sleep'"
            case m.ResetArgs():
                return "the trainer starts over (reset)"
        return None

    def stop_reason(self, request: AddRequest) -> str | None:
        """Return the stop reason of a request that this call ends. A reset unloads all adapters."""
        unloads = isinstance(self._args, m.UnloadAdapterArgs | m.ResetArgs) and request.adapter
        return ADAPTER_UNLOADED if unloads else None

    def count(self, client_id: str, choices: int, tokens: int) -> None:
        """Count choices of a request that end in the gateway, and their tokens."""
        entry = self.ended.setdefault(client_id, Ended())
        entry.choices += choices
        entry.tokens += tokens

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the replicas, with what has ended in the gateway."""
        if not self.ended:
            return report
        if isinstance(self._args, m.AbortArgs):
            return self._report_aborts(self._args, report)
        report = dict(report)
        if isinstance(self._args, m.ResetArgs):
            report["aborted"] += len(self.ended)
        elif "aborted_ids" in report:
            report["aborted_ids"] = list(dict.fromkeys([*report["aborted_ids"], *self.ended]))
            aborted = report["counts"]["aborted"] + sum(entry.choices for entry in self.ended.values())
            report["counts"] = report["counts"] | {"aborted": aborted}
            report["tokens_returned"] += sum(entry.tokens for entry in self.ended.values())
        return report

    def _report_aborts(self, args: m.AbortArgs, report: dict[str, Any]) -> dict[str, Any]:
        known = {entry["request_id"]: entry for entry in report["aborted"]}
        for request_id, ended in self.ended.items():
            entry = known.setdefault(request_id, {"request_id": request_id, "output_token_count": 0})
            entry["output_token_count"] += ended.tokens
        not_found = [name for name in report["not_found"] if name not in known and name != args.lora_name]
        return report | {"aborted": list(known.values()), "not_found": not_found}
