"""Sleep and wake-up: memory goes back to the system while the engine is held by a hold of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastdeploy.core.errors import FastDeployError, InvalidField, PauseTimeout, WrongOrder
from fastdeploy.core.runner import Runner
from fastdeploy.engine.pause import PauseState
from fastdeploy.engine.weights import NO_WEIGHTS, WeightSessions
from fastdeploy.inter_communicator.messages import SleepArgs, WakeArgs

WEIGHT, KV_CACHE = "weight", "kv_cache"
TAGS = (WEIGHT, KV_CACHE)
SLEEP_HOLD = "sleep"

Answer = Callable[[dict[str, Any], FastDeployError | None], None]


class Quiesced(NamedTuple):
    """A call whose pause is done. deadline: on the loop's clock."""

    tags: tuple[str, ...]
    discard: bool
    report: dict[str, Any]
    answer: Answer
    deadline: float


class Sleeper:
    """Decides the order of sleeping and waking, and owns the hold; the runner knows what sleeps (``runner.asleep``).
    ``settle`` is called between two steps, after the pauses have settled. pause: of the whole engine."""

    def __init__(
        self,
        runner: Runner,
        pause: PauseState,
        weights: WeightSessions,
        send_heartbeats: Callable[[], None],
        clock: Callable[[], float],
    ):
        self._runner = runner
        self._pause = pause
        self._weights = weights
        self._send_heartbeats = send_heartbeats
        self._clock = clock
        self._quiesced: list[Quiesced] = []
        self._num_open = 0  # calls that have not been answered; they share the hold

    @property
    def unanswered(self) -> int:
        return len(self._quiesced)

    def sleep(self, args: SleepArgs, answer: Answer) -> None:
        """Pause, then give the memory back. ``answer`` is called once, when that is done or has failed, which includes
        that it took longer than ``timeout_s``: then nothing has changed, and a hold that this call placed is released.
        """
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag not in self._runner.asleep)
        self._check(tags)
        deadline = self._clock() + args.timeout_s

        def paused(report: dict[str, Any], error: FastDeployError | None) -> None:
            if error is None:
                self._quiesced.append(Quiesced(tags, args.discard, report, answer, deadline))
                return
            self._num_open -= 1
            answer(self._state(), error)

        self._pause.pause_for_system(
            SLEEP_HOLD,
            mode=args.mode,
            clear_cache=KV_CACHE in tags,
            timeout_s=args.timeout_s,
            locked="what sleeps must be woken up (/v1/wakeup)",
            answer=paused,
        )
        self._num_open += 1

    def settle(self) -> None:
        """Put to sleep what the calls ask for whose pause is done, once nothing reads the weights on another thread."""
        if self._weights.staging_busy:
            self._time_out()
            return
        calls, self._quiesced = self._quiesced, []
        for call in calls:
            self._num_open -= 1
            try:
                self._check(call.tags)  # another call may have come first
                freed = self._runner.sleep(call.tags, call.discard, self._send_heartbeats)
            except FastDeployError as error:
                self._let_go()
                call.answer(self._state(), error)
            else:
                call.answer({**self._state(), "freed_bytes": freed, "pause": call.report}, None)

    def next_deadline(self) -> float | None:
        """Time at which ``settle`` must be called even if no message comes."""
        return min((call.deadline for call in self._quiesced), default=None)

    def _time_out(self) -> None:
        now = self._clock()
        late = [call for call in self._quiesced if call.deadline <= now]
        self._quiesced = [call for call in self._quiesced if call.deadline > now]
        for call in late:
            self._num_open -= 1
            self._let_go()
            why = "the weights were still being read on another thread after timeout_s: nothing sleeps, nothing changed"
            call.answer(self._state(), PauseTimeout(why))

    def fail(self, error: FastDeployError) -> None:
        """Answer every call that waits: the engine cannot go on."""
        calls, self._quiesced = self._quiesced, []
        for call in calls:
            call.answer({}, error)

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
        self._runner.wake(tags, self._send_heartbeats)
        if WEIGHT in tags and not self._runner.has_weights:
            self._weights.hold_for_republish(locked=NO_WEIGHTS)
        self._let_go()
        return {**self._state(), "state": self._pause.phase.value, "still_held_by": list(self._pause.holds)}

    def _check(self, tags: tuple[str, ...]) -> None:
        if not tags:
            raise WrongOrder("everything sleeps already")
        for tag in tags:
            if tag in self._runner.asleep:
                raise WrongOrder(f"{tag} sleeps already")
        if WEIGHT in tags and self._weights.session is not None:
            raise WrongOrder("the weights cannot sleep while a weight session is open: commit or abort it first")

    def _let_go(self) -> None:
        if not self._runner.asleep and not self._num_open:
            self._pause.release_system_hold(SLEEP_HOLD)

    def _state(self) -> dict[str, Any]:
        return {"asleep": sorted(self._runner.asleep), **self._pause.scope.weights_label()}


def _tags(given: tuple[str, ...]) -> tuple[str, ...]:
    for tag in given:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected {' or '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(given))
