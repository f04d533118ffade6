"""Sleep and wake-up: memory goes back to the system while the engine is held by a hold of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastdeploy.engine.pause import PauseState
from fastdeploy.errors import FastDeployError, InvalidField, WrongOrder
from fastdeploy.inter_communicator.messages import SleepArgs, WakeArgs
from fastdeploy.scheduler.interface import Runner

WEIGHT, KV_CACHE = "weight", "kv_cache"
TAGS = (WEIGHT, KV_CACHE)
SLEEP_HOLD = "sleep"

Answer = Callable[[dict[str, Any], FastDeployError | None], None]


class SleepEffects(Protocol):
    def weights_label(self) -> dict[str, Any]: ...
    def weights_in_use(self) -> bool: ...
    def hold_for_republish(self) -> None: ...


class Sleeper:
    """What sleeps is the runner's to know (``runner.asleep``); the order of things, and the hold, are decided here."""

    def __init__(self, runner: Runner, effects: SleepEffects, pause: PauseState):
        self._runner = runner
        self._effects = effects
        self._pause = pause

    def sleep(self, args: SleepArgs, answer: Answer) -> None:
        """Pause, then give the memory back. ``answer`` is called once, when that is done or has failed: then nothing
        has changed, and a hold that this call placed is released."""
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag not in self._runner.asleep)
        self._check(tags)

        def paused(report: dict[str, Any], error: FastDeployError | None) -> None:
            if error is not None:
                answer(self._state(), error)
                return
            try:
                self._check(tags)  # another call may have come first
                freed = self._runner.sleep(tags, args.discard)
            except FastDeployError as refused:
                self._let_go()
                answer(self._state(), refused)
                return
            answer({**self._state(), "freed_bytes": freed, "pause": report}, None)

        self._pause.pause_for_system(
            SLEEP_HOLD,
            mode=args.mode,
            clear_cache=KV_CACHE in tags,
            timeout_s=args.timeout_s,
            locked="what sleeps must be woken up (/v1/wakeup)",
            answer=paused,
        )

    def wake(self, args: WakeArgs) -> dict[str, Any]:
        """Take the memory again; with the last tag the hold goes. Raises WrongOrder or OutOfSpace, changing nothing."""
        asleep = self._runner.asleep
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag in asleep)
        if not tags:
            raise WrongOrder("nothing sleeps")
        for tag in tags:
            if tag not in asleep:
                raise WrongOrder(f"{tag} does not sleep")
        if KV_CACHE in tags and WEIGHT in asleep and WEIGHT not in tags:
            raise WrongOrder("kv_cache comes after weight: wake the weights up first")
        self._runner.wake(tags)
        if WEIGHT in tags and not self._runner.has_weights:
            self._effects.hold_for_republish()
        self._let_go()
        return {**self._state(), "state": self._pause.phase.value, "still_held_by": list(self._pause.holds)}

    def _check(self, tags: tuple[str, ...]) -> None:
        if not tags:
            raise WrongOrder("everything sleeps already")
        for tag in tags:
            if tag in self._runner.asleep:
                raise WrongOrder(f"{tag} sleeps already")
        if WEIGHT in tags and self._effects.weights_in_use():
            raise WrongOrder("the weights cannot sleep while they are being updated or read: end the session first")

    def _let_go(self) -> None:
        if not self._runner.asleep:
            self._pause.release_system_hold(SLEEP_HOLD)

    def _state(self) -> dict[str, Any]:
        return {"asleep": sorted(self._runner.asleep), **self._effects.weights_label()}


def _tags(given: tuple[str, ...]) -> tuple[str, ...]:
    for tag in given:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected {' or '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(given))
