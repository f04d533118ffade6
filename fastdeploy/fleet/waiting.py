"""The meaning of control calls for requests that no replica can end: they wait in the gateway, or their replica is lost
before it has told their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy.core.outputs import ADAPTER_UNLOADED
from fastdeploy.core.served_weights import WHOLE_ENGINE, adapter_scope
from fastdeploy.inter_communicator import messages as m

if TYPE_CHECKING:
    from fastdeploy.fleet.relay import Relay

ENDS = (m.AbortArgs, m.PauseArgs, m.SleepArgs, m.ResetArgs, m.UnloadAdapterArgs)


@dataclass
class Ended:
    """The part of one request that a call has ended: numbers of choices, and of tokens of them that the client has."""

    choices: int = 0
    tokens: int = 0


class Ending:
    """A control call that ends requests. Each of these knows it from the turn of the event loop in which the call is
    sent. The engines end what runs there; an unload lets it finish. What is at no replica ends in the gateway. So does
    what loses its replica from then on, as nobody knows whether the engine has ended it.

    ended: what has ended in the gateway, by the ids that clients know."""

    def __init__(self, args: m.Args):
        self.ended: dict[str, Ended] = {}
        self._args = args
        self._relays: list[Relay] = []

    def ask(self, relay: Relay) -> bool:
        """Let ``relay`` know this call, if the call ends it. Return whether it does."""
        if why_ended(self._args, relay) is None:
            return False
        self._relays.append(relay)
        relay.endings.append(self)
        return True

    def why(self, relay: Relay) -> str:
        """Return why this call ends a request that knows it."""
        why = why_ended(self._args, relay)
        assert why is not None
        return why

    def stop_reason(self, relay: Relay) -> str | None:
        """Return the stop reason of a request that knows this call. A reset unloads all adapters."""
        unloads = isinstance(self._args, m.UnloadAdapterArgs | m.ResetArgs) and relay.request.adapter
        return ADAPTER_UNLOADED if unloads else None

    def note(self, relay: Relay, choices: Sequence[int]) -> None:
        """Note that choices of ``relay`` end in the gateway."""
        entry = self.ended.setdefault(relay.client_id, Ended())
        entry.choices += len(choices)
        entry.tokens += sum(len(relay.tokens[k]) for k in choices)

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the replicas, with what has ended in the gateway."""
        return with_ended(self._args, report, self.ended)

    def withdraw(self) -> None:
        """Let the requests go on that have not ended, since the call has failed."""
        for relay in self._relays:
            relay.endings.remove(self)
        self._relays.clear()


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
        case m.UnloadAdapterArgs(lora_name=name) if name == adapter:
            return f"adapter {name!r} was unloaded, and no replica that still has it runs the request"
    return None


def with_ended(args: m.Args, report: dict[str, Any], ended: dict[str, Ended]) -> dict[str, Any]:
    """Return the report of a call, with what has ended in the gateway."""
    if not ended:
        return report
    if isinstance(args, m.AbortArgs):
        return _with_aborts(args, report, ended)
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


def _with_aborts(args: m.AbortArgs, report: dict[str, Any], ended: dict[str, Ended]) -> dict[str, Any]:
    known = {entry["request_id"]: entry for entry in report["aborted"]}
    for request_id, gone in ended.items():
        entry = known.setdefault(request_id, {"request_id": request_id, "output_token_count": 0})
        entry["output_token_count"] += gone.tokens
    not_found = [name for name in report["not_found"] if name not in known and name != args.lora_name]
    return report | {"aborted": list(known.values()), "not_found": not_found}
