"""The swap of weights and labels, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.request_table import RequestTable
from fastdeploy.core.runner import Runner, Staged
from fastdeploy.core.served_weights import CommittedState
from fastdeploy.engine.field_checks import check_epoch, check_label
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.inter_communicator.messages import SetVersionArgs
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import Scheduler


class WeightSwitch:
    """The switch to staged weights, and to another label of the weights that serve. on_commit(are_first): called after
    each commit. are_first: the weights are those of the start, with their label and EOS ids. events: gets the
    commits."""

    def __init__(
        self,
        runner: Runner,
        scopes: ScopeRegistry,
        scheduler: Scheduler,
        requests: RequestTable,
        metrics: EngineMetrics,
        on_commit: Callable[[bool], None] | None,
        events: EventLog,
    ):
        self._runner = runner
        self._scopes = scopes
        self._scheduler = scheduler
        self._requests = requests
        self._metrics = metrics
        self._on_commit = on_commit
        self._events = events
        self._first = self.committed()

    def committed(self) -> CommittedState:
        """Return all that the last commit has set, with the label of a later :meth:`relabel`."""
        served = self._scopes.base.served
        eos_token_ids = self._scheduler.eos_token_ids
        return CommittedState(served.version, served.weight_epoch, self._runner.fingerprint, eos_token_ids)

    def commit(self, staged: Staged, version: str | None, kv: str, weight_epoch: int | None = None) -> dict[str, Any]:
        """Change weights, ``weight_epoch``, label, KV namespace and EOS ids at once. Return the report. weight_epoch:
        above the one that serves; None = the next one. The EOS ids stay unless the source of the weights names some."""
        whole = self._scopes.whole
        before = whole.model.served
        if weight_epoch is None:
            weight_epoch = before.weight_epoch + 1
        assert weight_epoch > before.weight_epoch
        in_flight = [r for r in self._requests if r.num_computed]
        recompute = kv == "recompute"
        to_recompute = sum(r.num_computed for r in in_flight) if recompute else 0
        self._runner.commit(staged.weights)
        self._scopes.serve(version if version is not None else str(weight_epoch), weight_epoch)
        self._metrics.commits.labels("engine", kv).inc()
        if self._events.watched:
            served = whole.model.served
            fields = {"version": served.version, "weight_epoch": weight_epoch, "adapter_epoch": 0, "kv": kv}
            self._events.add(EventKind.COMMITTED, whole.id, **fields)
        self._scheduler.weights_changed(whole.model, before, recompute)
        if staged.eos_token_ids is not None:
            self._scheduler.set_eos(staged.eos_token_ids)
        if self._on_commit is not None:
            first = self._first._replace(weight_epoch=weight_epoch)
            self._on_commit(first.fingerprint is not None and self.committed() == first)
        return {
            "status": "committed",
            **whole.weights_label(),
            **self.committed()._asdict(),
            "previous_version": before.version,
            "previous_weight_epoch": before.weight_epoch,
            "kv": kv,
            "requests_in_flight": len(in_flight),
            "tokens_to_recompute": to_recompute,
        }

    @handles(SetVersionArgs)
    def set_version(self, args: SetVersionArgs) -> dict[str, Any]:
        """See ``relabel``."""
        return self.relabel(args.version, args.weight_epoch, args.eos_token_ids)

    def relabel(
        self, version: str | None, weight_epoch: int | None = None, eos_token_ids: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Change the label of future tokens. None keeps the label. No past span, no KV and no request changes.
        weight_epoch: also change this number; new requests find no prefix that was cached before. eos_token_ids: also
        change these, as a commit does. Raises InvalidField, or VersionConflict for a number below the present one."""
        check_label("version", version)
        serves = self._scopes.base.served.weight_epoch
        if weight_epoch != serves:
            check_epoch(weight_epoch, serves)
        if version is not None:
            self._scopes.serve(version, serves if weight_epoch is None else weight_epoch)
        if eos_token_ids is not None:
            self._scheduler.set_eos(eos_token_ids)
        return self._scopes.whole.weights_label()
