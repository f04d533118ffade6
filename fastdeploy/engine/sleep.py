"""Sleep and wake-up: the engine gives memory back to the system. A system hold stands meanwhile.

    sleep    pause -> write the weights to a file -> give the memory back
    wake-up  read the weights from the file -> take the memory of the KV cache -> release the hold

The staging thread writes and reads, so the loop answers calls meanwhile. All else happens between two steps. A copy
that fails, hangs or comes too late is abandoned, and nothing has changed then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from fastdeploy.core.errors import EngineError, FastDeployError, InvalidField, PauseTimeout, StagingTimeout, WrongOrder
from fastdeploy.core.runner import Runner, WeightMove
from fastdeploy.engine.adapters.reads import AdapterReads
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.holds import SYSTEM
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job
from fastdeploy.engine.updates.weights import NO_WEIGHTS, WeightSessions
from fastdeploy.inter_communicator.messages import PauseArgs, SleepArgs, WakeArgs

WEIGHT, KV_CACHE = "weight", "kv_cache"
TAGS = (WEIGHT, KV_CACHE)
SLEEP_HOLD = "sleep"


log = logging.getLogger("fastdeploy.engine")


class PausedCall(NamedTuple):
    """A sleep call whose pause is complete. report: of the pause. deadline: on the loop's clock."""

    tags: tuple[str, ...]
    discard: bool
    report: dict[str, Any]
    answer: Answer
    deadline: float


class Sleeper:
    """The handler of sleep and wake calls, and the owner of their hold. The loop calls ``settle`` between two steps,
    after the pauses have settled. pause: of the whole engine. wake_timeout_s: seconds that reading the weights back may
    take.

    Sleep calls are served one after the other. A wake-up is refused while another one reads, or if its tags do not
    sleep yet."""

    def __init__(
        self,
        runner: Runner,
        pause: PauseState,
        weights: WeightSessions,
        adapters: AdapterReads,
        clock: Callable[[], float],
        wake_timeout_s: float,
    ):
        self._runner = runner
        self._pause = pause
        self._weights = weights
        self._thread = weights.thread
        self._adapters = adapters
        self._clock = clock
        self._wake_timeout_s = wake_timeout_s
        self._paused: list[PausedCall] = []
        self._writing: PausedCall | None = None
        self._wakes = False  # the staging thread reads the weights back
        self._num_open = 0  # sleep calls without an answer yet; they share the hold

    @property
    def unanswered(self) -> int:
        """Number of sleep calls whose pause is complete, and which have no answer yet."""
        return len(self._paused) + (self._writing is not None)

    # ------------------------------------------------------------------ sleep

    @handles(SleepArgs)
    def sleep(self, args: SleepArgs, answer: Answer) -> None:
        """Pause, then give the memory back. ``answer`` is called once, at success or failure. After a failure, such as
        the end of ``timeout_s``, nothing has changed and the hold of this call is released."""
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag not in self._runner.asleep)
        if (refusal := self._refusal(tags)) is not None:
            raise refusal
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
        """Serve the calls whose pause is complete, whenever the staging thread is idle. Time out those that wait."""
        while self._paused and not self._thread.busy:
            self._begin(self._paused.pop(0))
        now = self._clock()
        late = [call for call in self._paused if call.deadline <= now]
        self._paused = [call for call in self._paused if call.deadline > now]
        for call in late:
            self._refuse(call, PauseTimeout(f"{_TOO_LATE}: another job on the weights went on"))

    def next_deadline(self) -> float | None:
        """Time at which the loop must go on even if no message comes."""
        calls = [*self._paused, self._writing] if self._writing is not None else self._paused
        return min((call.deadline for call in calls), default=None)

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting call with ``error``, when the engine ends."""
        calls, self._paused = self._paused, []
        for call in calls:
            call.answer({}, error)

    def _begin(self, call: PausedCall) -> None:
        """Write the weights beside the loop if they must be kept, and go to sleep then."""
        if (refusal := self._refusal(call.tags)) is not None:  # an earlier call may have changed what sleeps
            self._refuse(call, refusal)
            return
        written = self._runner.begin_sleep(call.tags, call.discard)
        if written is None:
            self._fall_asleep(call, None)
            return

        def on_written(_: None, error: FastDeployError | None, seconds: float) -> None:
            self._writing = None
            if isinstance(error, StagingTimeout):
                error = PauseTimeout(f"{_TOO_LATE}: the weights were being written")
            error = error or self._refusal(call.tags)  # a session may have begun
            if error is None:
                self._fall_asleep(call, written)
            else:
                written.abandon()
                self._refuse(call, error)

        self._writing = call
        timeout_s = max(call.deadline - self._clock(), 0.0)
        self._thread.submit(Job(self, written.run, on_written, timeout_s, reads=True))

    def _fall_asleep(self, call: PausedCall, written: WeightMove | None) -> None:
        self._num_open -= 1
        freed = self._runner.sleep(call.tags, written)
        if WEIGHT in call.tags:
            freed += self._adapters.free_memory()
        call.answer({**self._state(), "freed_bytes": freed, "pause": call.report}, None)

    def _refuse(self, call: PausedCall, error: FastDeployError) -> None:
        self._num_open -= 1
        self._release_hold_if_unused()
        call.answer(self._state(), error)

    def _refusal(self, tags: tuple[str, ...]) -> FastDeployError | None:
        """Return why ``tags`` cannot go to sleep now, or None if they can."""
        if not tags:
            return WrongOrder("everything sleeps already")
        for tag in tags:
            if tag in self._runner.asleep:
                return WrongOrder(f"{tag} sleeps already")
        if WEIGHT in tags and self._weights.session is not None:
            return WrongOrder("the weights cannot sleep while a weight session is open: commit or abort it first")
        return None

    # ------------------------------------------------------------------ wake-up

    @handles(WakeArgs)
    def wake(self, args: WakeArgs, answer: Answer) -> None:
        """Take memory again, once the weights are read back. The hold is released when nothing sleeps any more.
        ``answer`` is called once. Raises WrongOrder or OutOfSpace. After an error nothing has changed."""
        tags = self._tags_to_wake(args)
        read = self._runner.begin_wake(tags)
        if read is None:
            answer(self._woken(tags, None), None)
            return

        def on_read(_: None, error: FastDeployError | None, seconds: float) -> None:
            self._wakes = False
            report: dict[str, Any] = {}
            if error is None:
                try:
                    report = self._woken(tags, read)
                except FastDeployError as failure:
                    error = failure
                except Exception as failure:  # the weights still sleep, and the call may be repeated
                    log.exception("a wake-up failed")
                    error = EngineError(f"the wake-up failed: {type(failure).__name__}: {failure}")
            if error is not None:
                read.abandon()
            answer({**self._state(), **report}, error)

        self._wakes = True
        self._thread.submit(Job(self, read.run, on_read, self._wake_timeout_s, reads=True))

    def _tags_to_wake(self, args: WakeArgs) -> tuple[str, ...]:
        asleep = self._runner.asleep
        tags = _tags(args.tags) or tuple(tag for tag in TAGS if tag in asleep)
        not_yet = " yet: ask again when the sleep call is answered" if self._num_open else ""
        if self._wakes:
            raise WrongOrder("a wake-up is reading the weights: ask again when it is answered")
        if not tags:
            raise WrongOrder(f"nothing sleeps{not_yet}")
        for tag in tags:
            if tag not in asleep:
                raise WrongOrder(f"{tag} does not sleep{not_yet}")
        if KV_CACHE in tags and WEIGHT in asleep and WEIGHT not in tags:
            raise WrongOrder("the weights must wake up before kv_cache")
        return tags

    def _woken(self, tags: tuple[str, ...], read: WeightMove | None) -> dict[str, Any]:
        """Take the memory, and return the report."""
        self._runner.wake(tags, read)
        if WEIGHT in tags and not self._runner.has_weights:
            self._weights.hold_for_republish(locked=NO_WEIGHTS)
        elif WEIGHT in tags:
            self._weights.refresh_standby()  # the sleep has freed the standby copy
        self._release_hold_if_unused()
        return {**self._state(), "state": self._pause.phase.value, "still_held_by": list(self._pause.holds)}

    # ------------------------------------------------------------------ both

    def _release_hold_if_unused(self) -> None:
        if not self._runner.asleep and not self._num_open:
            self._pause.release_system_hold(SLEEP_HOLD)

    def _state(self) -> dict[str, Any]:
        return {"asleep": sorted(self._runner.asleep), **self._pause.scope.weights_label()}


_TOO_LATE = "the engine was not asleep within timeout_s, and nothing has changed"


def _tags(given: tuple[str, ...]) -> tuple[str, ...]:
    for tag in given:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected {' or '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(given))
