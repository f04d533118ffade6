"""All scopes of an engine with the pause state of each, and the models that they hold."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.scope import WHOLE_ENGINE, Scope, ServedModel, adapter_scope
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.engine.delivery import Answer
from fastdeploy.engine.lifecycle import RequestLifecycle
from fastdeploy.engine.pause import PauseState
from fastdeploy.inter_communicator.messages import PauseArgs, ResumeArgs


class Scopes:
    """The scope of the whole engine, and one scope for each adapter name. A request is scheduled only if the gate of
    its own scope and the gate of the whole engine both allow that. A scope without a hold costs no time per step. The
    scope of a name exists while it has an adapter or a hold.

    base: the base model. adapters: the models over it, also those that were unloaded and still have requests."""

    def __init__(self, lifecycle: RequestLifecycle, boot_id: str, clock: Callable[[], float]):
        self._lifecycle = lifecycle
        self._clock = clock
        self.whole = Scope(WHOLE_ENGINE, boot_id)
        self.base = self.whole.model
        self.adapters: dict[ServedModel, None] = {}
        self.whole_pause = PauseState(self.whole, lifecycle, clock)
        self._pauses = {WHOLE_ENGINE: self.whole_pause}
        self._held = [self.whole_pause]  # scopes with a hold, and always the whole engine, where system holds stand

    def add(self, served: ServedWeights) -> ServedModel:
        """Add the model of an adapter to the scope of its name. The scope is made if there is none."""
        scope_id = adapter_scope(served.adapter_name)
        if scope_id not in self._pauses:
            scope = Scope(scope_id, self.whole.boot_id, self.whole)
            self._pauses[scope_id] = PauseState(scope, self._lifecycle, self._clock)
        scope = self._pauses[scope_id].scope
        scope.num_models += 1
        scope.model = model = ServedModel(scope, served)
        self.adapters[model] = None
        return model

    def remove(self, model: ServedModel) -> None:
        """Remove the model of an adapter, which has no requests any more."""
        assert not model.requests
        del self.adapters[model]
        model.scope.num_models -= 1
        self._remove_if_unused(self._pauses[model.scope.id])

    def _remove_if_unused(self, pause: PauseState) -> None:
        unused = not pause.scope.num_models and not pause.holds
        if unused and self._pauses.get(pause.scope.id) is pause:
            del self._pauses[pause.scope.id]

    def pause_of(self, scope_id: str) -> PauseState:
        """Return the pause state of a scope. Raises InvalidField for an unknown scope."""
        if (pause := self._pauses.get(scope_id)) is None:
            raise InvalidField("scope", f"there is no scope {scope_id!r}")
        return pause

    def serve(self, version: str, weight_epoch: int) -> None:
        """Set the base weights that compute all models from the next step on, and their label."""
        before, self.base.served = self.base.served, ServedWeights(version, weight_epoch)
        if weight_epoch != before.weight_epoch:
            for model in self.adapters:
                model.served = msgspec.structs.replace(model.served, weight_epoch=weight_epoch)

    def pause(self, args: PauseArgs, answer: Answer) -> None:
        """Pause one scope. See ``PauseState.pause``."""
        pause = self.pause_of(args.scope)
        pause.pause(args, answer)
        if pause not in self._held:
            self._held.append(pause)

    def release_anonymous_holds(self) -> list[str]:
        """Release the anonymous holds of all scopes. Return their names."""
        return [hold for pause in self._held for hold in pause.resume(ResumeArgs())["released"]]

    def holds(self) -> list[str]:
        """Return the names of all holds that stand, of all scopes."""
        return [hold for pause in self._held for hold in pause.holds]

    def settle(self) -> None:
        """Call ``PauseState.settle`` of each scope with a hold."""
        for pause in self._held:
            pause.settle()
        if len(self._held) > 1:
            held, self._held = self._held, [self.whole_pause]
            for pause in held[1:]:
                if pause.holds:
                    self._held.append(pause)
                else:
                    self._remove_if_unused(pause)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if no message comes."""
        return min((due for pause in self._held if (due := pause.next_deadline()) is not None), default=None)

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting pause call with ``error``, when the engine ends."""
        for pause in self._held:
            pause.fail(error)
