"""All scopes of an engine with the pause state of each, and the models of each scope."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from fastdeploy.core.errors import FastDeployError, InvalidField, PauseBlocked
from fastdeploy.core.events import EventLog
from fastdeploy.core.request import Scope, ServedModel
from fastdeploy.core.served_weights import ADAPTER_PREFIX, WHOLE_ENGINE, ServedWeights, adapter_scope
from fastdeploy.engine.field_checks import adapter_not_found
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.holds import Mode
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.requests.delivery import Answer, Delivery
from fastdeploy.engine.requests.lifecycle import RequestLifecycle
from fastdeploy.inter_communicator.messages import AbortArgs, PauseArgs, PauseStatusArgs, RenewArgs, ResumeArgs
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.queue import Gate
from fastdeploy.scheduler.scheduler import Scheduler

MAX_HOLDS = 1024  # of callers, on the whole engine, and as many on all adapters together


class ScopeRegistry:
    """The scope of the whole engine, and one scope for each adapter name. A request is scheduled only if the gate of
    its own scope and the gate of the whole engine both allow that. An adapter's scope costs time per step only while it
    drains. The scope of a name exists while it has an adapter or a hold.

    base: the base model. adapters: the models over it, also those that were unloaded and still have requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        lifecycle: RequestLifecycle,
        delivery: Delivery,
        metrics: EngineMetrics,
        boot_id: str,
        clock: Callable[[], float],
        events: EventLog,
    ):
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._clock = clock
        self._new_pause = functools.partial(
            PauseState, scheduler=scheduler, lifecycle=lifecycle, delivery=delivery, clock=clock, events=events
        )
        self.whole = Scope(WHOLE_ENGINE, boot_id)
        self.base = self.whole.model
        self.adapters: dict[ServedModel, None] = {}
        self.whole_pause = self._new_pause(self.whole, metrics=metrics)
        self._pauses = {WHOLE_ENGINE: self.whole_pause}
        self._held: list[PauseState] = []  # of adapters, with a hold
        self._moving: list[PauseState] = []  # of adapters: those to settle before the next step
        self._due = math.inf  # time at which a hold of the other adapters ends

    def add(self, served: ServedWeights) -> ServedModel:
        """Add the model of an adapter to the scope of its name. The scope is made if there is none."""
        scope_id = adapter_scope(served.adapter_name)
        if scope_id not in self._pauses:
            scope = Scope(scope_id, self.whole.boot_id, self.whole)
            self._pauses[scope_id] = self._new_pause(scope)
        scope = self._pauses[scope_id].scope
        scope.num_models += 1
        scope.model = model = ServedModel(scope, served)
        self.adapters[model] = None
        return model

    def remove(self, model: ServedModel) -> None:
        """Remove the model of an adapter, which has no requests any more."""
        assert not model.requests
        scope = model.scope
        del self.adapters[model]
        scope.num_models -= 1
        if scope.model is model and scope.num_models:  # the scope shows an older one, which still has requests
            scope.model = next(other for other in reversed(self.adapters) if other.scope is scope)
        self._remove_if_unused(self._pauses[scope.id])

    def _remove_if_unused(self, pause: PauseState) -> None:
        unused = not pause.scope.num_models and not pause.holds
        if unused and self._pauses.get(pause.scope.id) is pause:
            del self._pauses[pause.scope.id]

    def find(self, scope_id: str) -> PauseState | None:
        """Return the pause state of a scope, if there is one."""
        return self._pauses.get(scope_id)

    def pause_of(self, scope_id: str) -> PauseState:
        """Return the pause state of a scope. Raises ModelNotFound for an adapter that is not known, unless a hold or a
        request of that name is left."""
        if (pause := self.find(scope_id)) is None:
            raise adapter_not_found(scope_id.removeprefix(ADAPTER_PREFIX), "lora_name")
        return pause

    def serve(self, version: str, weight_epoch: int) -> None:
        """Set the base weights that compute all models from the next step on, and their label."""
        before = self.base.served
        self.base.served = msgspec.structs.replace(before, version=version, weight_epoch=weight_epoch)
        if weight_epoch != before.weight_epoch:
            for model in self.adapters:
                model.served = msgspec.structs.replace(model.served, weight_epoch=weight_epoch)

    # ------------------------------------------------------------------ calls

    @handles(PauseArgs)
    def pause(self, args: PauseArgs, answer: Answer) -> None:
        """Pause one scope. See ``PauseState.pause``. Raises also InvalidField if too many holds stand, and PauseBlocked
        for a wait that cannot end."""
        pause = self.pause_of(args.scope)
        counted = [pause] if pause is self.whole_pause else self._held
        if args.hold_id not in pause.holds and sum(len(other.holds) for other in counted) >= MAX_HOLDS:
            raise InvalidField("hold_id", f"{MAX_HOLDS} holds stand already; release one, or name one that stands")
        if pause is not self.whole_pause:
            self._check_can_end(pause, args)
        pause.pause(args, answer)
        if pause is not self.whole_pause and pause not in self._held:
            self._held.append(pause)
        self._due = -math.inf

    def _check_can_end(self, pause: PauseState, args: PauseArgs) -> None:
        """Raise PauseBlocked for a new wait of an adapter with started requests that the whole engine freezes. Without
        that, the call would be silent until its time-out, and its caller would not learn why."""
        waits = args.mode.lower() == "wait" and pause.mode in (None, Mode.WAIT) and not pause.is_paused
        if not waits or args.hold_id in pause.holds or self.whole_pause.gate is not Gate.CLOSED:
            return
        if not self._scheduler.drained(pause.scope):
            held_by = list(self.whole_pause.holds)
            why = f"holds of the whole engine freeze its requests ({', '.join(map(repr, held_by))})"
            raise PauseBlocked(f"mode: a wait of {pause.scope.id!r} cannot end: {why}", param="mode", held_by=held_by)

    @handles(ResumeArgs)
    def resume(self, args: ResumeArgs) -> dict[str, Any]:
        """Release holds of one scope. See ``PauseState.resume``."""
        self._due = -math.inf
        return self.pause_of(args.scope).resume(args)

    @handles(RenewArgs)
    def renew(self, args: RenewArgs) -> dict[str, Any]:
        """Set the ttl of a hold anew. See ``PauseState.renew``."""
        self._due = -math.inf
        return self.pause_of(args.scope).renew(args)

    @handles(PauseStatusArgs)
    def status(self, args: PauseStatusArgs) -> dict[str, Any]:
        """Return the pause status of one scope. That of the whole engine has "scopes": the status of each adapter with
        a hold."""
        pause = self.pause_of(args.scope)
        if pause is not self.whole_pause:
            return pause.status()
        counts = self._lifecycle.count_by_scope() if self._held else {}
        scopes = [held.describe(*counts.get(held.scope, (0, 0))) for held in self._held]
        return {**pause.status(), "scopes": scopes}

    def abort(self, args: AbortArgs, client: str | None = None) -> dict[str, Any]:
        """End requests. See messages.AbortArgs. client: end requests of this connection only. Raises InvalidField."""
        given = (args.request_ids is not None, args.abort_all, args.lora_name is not None, args.session is not None)
        if sum(given) != 1:
            why = "expected exactly one of a list of request ids, abort_all, lora_name and session"
            raise InvalidField("req_ids", why)
        if args.session is not None:
            return self._lifecycle.abort_session(args.session)
        if (pause := self.find(adapter_scope(args.lora_name))) is None:
            return {"aborted": [], "not_found": [args.lora_name]}
        return self._lifecycle.abort(args.request_ids, pause.scope, client)

    def release_anonymous_holds(self) -> list[str]:
        """Release the anonymous holds of all scopes. Return their names."""
        self._due = -math.inf
        paused = (self.whole_pause, *self._held)
        return [hold for pause in paused for hold in pause.resume(ResumeArgs())["released"]]

    def holds(self) -> list[str]:
        """Return the names of all holds that stand, of all scopes."""
        return [hold for pause in (self.whole_pause, *self._held) for hold in pause.holds]

    def describe_holds(self) -> list[dict[str, Any]]:
        """Return a description of every hold that stands, of all scopes."""
        now, paused = self._clock(), (self.whole_pause, *self._held)
        return [hold.describe(now) for pause in paused for hold in pause.holds.values()]

    def keep_holds(self) -> None:
        """Let no waiting pause call release its hold at its time-out, since another gateway leads now."""
        for pause in (self.whole_pause, *self._held):
            pause.keep_holds()

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting pause call with ``error``, when the engine ends."""
        for pause in (self.whole_pause, *self._held):
            pause.fail(error)

    # ------------------------------------------------------------------ progress

    def settle(self) -> None:
        """Call ``PauseState.settle`` of each scope that may change now."""
        self.whole_pause.settle()
        if self._held and self._clock() >= self._due:
            self._moving, self._due = self._held, math.inf
        if self._moving:
            self._settle_adapters()

    def _settle_adapters(self) -> None:
        for pause in self._moving:
            pause.settle()
        resting = [pause for pause in self._moving if pause.at_rest]
        self._moving = [pause for pause in self._moving if not pause.at_rest]
        self._due = min([self._due, *(due for pause in resting if (due := pause.next_deadline()) is not None)])
        for pause in [pause for pause in resting if not pause.holds]:
            self._held.remove(pause)
            self._remove_if_unused(pause)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if no message comes."""
        paused = (self.whole_pause, *self._held)
        return min((due for pause in paused if (due := pause.next_deadline()) is not None), default=None)
