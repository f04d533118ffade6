"""Sleep and wake-up: the engine gives memory back to the system. A system hold stands meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastdeploy.core.errors import FastDeployError, InvalidField, PauseTimeout, WrongOrder
from fastdeploy.core.runner import Runner
from fastdeploy.engine.adapter_reads import AdapterReads
from fastdeploy.engine.delivery import Answer
from fastdeploy.engine.holds import SYSTEM
from fastdeploy.engine.pause import PauseState
from fastdeploy.engine.weights import NO_WEIGHTS, WeightSessions
from fastdeploy.inter_communicator.messages import PauseArgs, SleepArgs, WakeArgs

WEIGHT, KV_CACHE = "weight", "kv_cache"
TAGS = (WEIGHT, KV_CACHE)
SLEEP_HOLD = "sleep"


class PausedCall(NamedTuple):
    """A sleep call whose pause is complete. report: of the pause. deadline: on the loop's clock."""

    tags: tuple[str, ...]
    discard: bool
    report: dict[str, Any]
    answer: Answer
    deadline: float


class Sleeper:
    """Handles sleep and wake calls, and owns their hold. The loop calls ``settle`` between two steps, after the pauses
    have settled. pause: of the whole engine."""

    def __init__(
        self,
        runner: Runner,
        pause: PauseState,
        weights: WeightSessions,
        adapters: AdapterReads,
        send_heartbeats: Callable[[], None],
        clock: Callable[[], float],
    ):
        self._runner = runner
        self._pause = pause
        self._weights = weights
        self._adapters = adapters
        self._send_heartbeats = send_heartbeats
        self._clock = clock
        self._paused: list[PausedCall] = []
        self._num_open = 0  # sleep calls without an answer yet; they share the hold

    @property
    def unanswered(self) -> int:
        return len(self._paused)

    def sleep(self, args: SleepArgs, answer: Answer) -> None:
        """Pause, then give the memory back. ``answer`` is called once, at success or failure. After a failure, such as
        the end of ``timeout_s``, nothing has changed and the hold of this call is released."""
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag not in self._runner.asleep)
        self._check(tags)
        deadline = self._clock() + args.timeout_s

        def paused(report: dict[str, Any], error: FastDeployError | None) -> None:
            if error is None:
                self._paused.append(PausedCall(tags, args.discard, report, answer, deadline))
                return
            self._num_open -= 1
            answer(self._state(), error)

        pause = PauseArgs(
            mode=args.mode,
            clear_cache=KV_CACHE in tags,
            admission="hold",
            timeout_s=args.timeout_s,
            on_timeout="cancel",
            placed_by=SYSTEM,
        )
        self._pause.pause(pause, paused, SLEEP_HOLD, locked="the engine sleeps; wake it up first (/v1/wakeup)")
        self._num_open += 1

    def settle(self) -> None:
        """Serve the calls whose pause is complete, as soon as the staging thread is idle."""
        if self._weights.staging_busy:
            self._time_out()
            return
        calls, self._paused = self._paused, []
        for call in calls:
            self._num_open -= 1
            try:
                self._check(call.tags)  # an earlier call may have changed what sleeps
                freed = self._runner.sleep(call.tags, call.discard, self._send_heartbeats)
                if WEIGHT in call.tags:
                    freed += self._adapters.free_memory()
            except FastDeployError as error:
                self._release_hold_if_unused()
                call.answer(self._state(), error)
            else:
                call.answer({**self._state(), "freed_bytes": freed, "pause": call.report}, None)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if no message comes."""
        return min((call.deadline for call in self._paused), default=None)

    def _time_out(self) -> None:
        now = self._clock()
        late = [call for call in self._paused if call.deadline <= now]
        self._paused = [call for call in self._paused if call.deadline > now]
        for call in late:
            self._num_open -= 1
            self._release_hold_if_unused()
            why = "another thread still worked on the weights after timeout_s: this call has changed nothing"
            call.answer(self._state(), PauseTimeout(why))

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting call with ``error``, when the engine ends."""
        calls, self._paused = self._paused, []
        for call in calls:
            call.answer({}, error)

    def wake(self, args: WakeArgs) -> dict[str, Any]:
        """Take memory again. The hold is released when nothing sleeps any more. Raises WrongOrder or OutOfSpace, and
        then changes nothing."""
        asleep = self._runner.asleep
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag in asleep)
        if not tags:
            raise WrongOrder("nothing sleeps")
        for tag in tags:
            if tag not in asleep:
                raise WrongOrder(f"{tag} does not sleep")
        if KV_CACHE in tags and WEIGHT in asleep and WEIGHT not in tags:
            raise WrongOrder("the weights must wake up before kv_cache")
        self._runner.wake(tags, self._send_heartbeats)
        if WEIGHT in tags and not self._runner.has_weights:
            self._weights.hold_for_republish(locked=NO_WEIGHTS)
        self._release_hold_if_unused()
        return {**self._state(), "state": self._pause.phase.value, "still_held_by": list(self._pause.holds)}

    def _check(self, tags: tuple[str, ...]) -> None:
        if not tags:
            raise WrongOrder("everything sleeps already")
        for tag in tags:
            if tag in self._runner.asleep:
                raise WrongOrder(f"{tag} sleeps already")
        if WEIGHT in tags and self._weights.session is not None:
            raise WrongOrder("the weights cannot sleep while a weight session is open: commit or abort it first")

    def _release_hold_if_unused(self) -> None:
        if not self._runner.asleep and not self._num_open:
            self._pause.release_system_hold(SLEEP_HOLD)

    def _state(self) -> dict[str, Any]:
        return {"asleep": sorted(self._runner.asleep), **self._pause.scope.weights_label()}


def _tags(given: tuple[str, ...]) -> tuple[str, ...]:
    for tag in given:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected {' or '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(given))
