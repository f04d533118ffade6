"""Work on weights beside the steps. A few jobs run at once, each on its own thread.

A job may hang forever in a read, for example from a dead mount. Then the job is abandoned: its thread stays blocked,
its result is dropped if one comes, and the next job runs on a new thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import FastDeployError, OutOfSpace, StagingTimeout, UpdateInProgress, WeightUpdateRefused

log = logging.getLogger("fastdeploy.engine")
THREAD_NAME = "stage-weights"
MAX_LEFT_BEHIND = 4  # abandoned jobs that still hang


@dataclass(eq=False)
class Job:
    """A job of a staging thread, which calls ``work``. ``on_end(result, error, seconds)`` is called once, on the loop's
    thread. owner: ``give_up`` ends all jobs of an owner. timeout_s: seconds that ``work`` may take. reads: True if
    ``work`` reads files and may hang. discard: called with the result of an abandoned job, on the loop's thread, if one
    comes. deadline: on the loop's clock; given if the time in the queue counts too. Otherwise it is set at the start.

    The result may be a second copy of the weights. So after ``on_end`` nothing may refer to the job, and an error must
    not refer to the stack frames of its exception.
    """

    owner: object
    work: Callable[[], Any] | None  # None once started: the closure refers to the staged weights
    on_end: Callable[[Any, FastDeployError | None, float], None]
    timeout_s: float
    reads: bool
    discard: Callable[[Any], None] | None = None
    deadline: float = math.inf
    started_at: float = 0.0  # on the loop's clock
    result: Any = None
    error: FastDeployError | None = None
    seconds: float = 0.0
    finished: bool = False

    def run(self) -> None:
        began = time.monotonic()
        work, self.work = self.work, None
        assert work is not None
        try:
            self.result = work()
        except FastDeployError as error:
            error.__cause__ = error.__context__ = None
            self.error = error.with_traceback(None)
        except MemoryError as error:
            self.error = OutOfSpace(f"no memory for the new weights: {error}")
        except Exception as error:  # a reader may raise anything for a bad file
            log.warning("new weights could not be read", exc_info=True)
            self.error = WeightUpdateRefused(f"{type(error).__name__}: {error}")
        self.seconds = time.monotonic() - began
        self.finished = True


class StagingThread:
    """A queue of jobs, of which ``width`` may run at once. The loop's thread calls all methods; a job's thread calls
    ``wake`` when it has finished."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float], width: int = 1):
        self._wake, self._clock, self._width = wake, clock, width
        self._queue: deque[Job] = deque()
        self._first_late = (
            math.inf
        )  # no waiting job is too late before this time; it may be that of a job that does not wait any more
        self._running: list[Job] = []  # in the order of their start
        self._left_behind: list[Job] = []
        self._closed = False
        self._waking = threading.Lock()  # prevents a ``wake`` after ``close``, when the transport is closed

    @property
    def busy(self) -> bool:
        """True while a job runs or waits. Abandoned jobs do not count."""
        return bool(self._running or self._queue)

    def check_room(self) -> None:
        """Raise UpdateInProgress if MAX_LEFT_BEHIND abandoned reads still hang: no further read may start then."""
        number = sum(job.reads for job in self._left_behind)
        if number >= MAX_LEFT_BEHIND:
            raise UpdateInProgress(f"{number} reads of weights hang; try again when one of them has ended")

    def next_deadline(self) -> float | None:
        due = min((job.deadline for job in self._running), default=math.inf)
        return None if (first := min(due, self._first_late)) == math.inf else first

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        self._first_late = min(self._first_late, job.deadline)
        self._start_next()

    def give_up(self, owner: object, error: FastDeployError) -> None:
        """End the jobs of ``owner`` with ``error``. A running job is abandoned."""
        mine = [job for job in self._queue if job.owner is owner]
        self._queue = deque(job for job in self._queue if job.owner is not owner)
        for job in [job for job in self._running if job.owner is owner]:
            self._leave_behind(job, error)
        for job in mine:
            job.on_end(None, error, 0.0)
        self._start_next()

    def poll(self) -> None:
        """Call ``on_end`` of each job that has finished or timed out, and start the next jobs."""
        for late in [job for job in self._left_behind if job.finished]:
            self._left_behind.remove(late)
            if late.discard is not None and late.result is not None:
                late.discard(late.result)
            del late
        while (job := self._first_due()) is not None:
            if job.finished:
                self._running.remove(job)
                job.on_end(job.result, job.error, job.seconds)  # may end other jobs
            else:
                why = f"the work on the weights took longer than {job.timeout_s:g} s (timeout_s, --stage-timeout-s)"
                log.error("%s; it is abandoned", why)
                self._leave_behind(job, StagingTimeout(f"{why} and was abandoned"))
            del job
            self._start_next()
        self._refuse_late()

    def _first_due(self) -> Job | None:
        now = self._clock()
        return next((job for job in self._running if job.finished or job.deadline <= now), None)

    def _refuse_late(self) -> None:
        """End the waiting jobs whose time is over."""
        if (now := self._clock()) < self._first_late:
            return
        late = [job for job in self._queue if job.deadline <= now]
        self._queue = deque(job for job in self._queue if job.deadline > now)
        self._first_late = min((job.deadline for job in self._queue), default=math.inf)
        for job in late:
            why = f"the work on the weights waited for other work until its {job.timeout_s:g} s were over"
            job.on_end(None, StagingTimeout(f"{why} (timeout_s, --stage-timeout-s)"), 0.0)

    def close(self, error: FastDeployError) -> None:
        """End every job with ``error``, also a running one, when the engine ends."""
        with self._waking:
            self._closed = True
        jobs, self._queue, self._running = [*self._running, *self._queue], deque(), []
        for job in jobs:
            job.on_end(None, error, 0.0)

    def _leave_behind(self, job: Job, error: FastDeployError) -> None:
        self._running.remove(job)
        self._left_behind.append(job)
        job.on_end(None, error, self._clock() - job.started_at)

    def _start_next(self) -> None:
        self._refuse_late()
        while len(self._running) < self._width and self._queue and not self._closed:
            job = self._queue.popleft()
            try:
                if job.reads:
                    self.check_room()
            except UpdateInProgress as error:
                job.on_end(None, error, 0.0)
                continue
            job.started_at = self._clock()
            job.deadline = min(job.deadline, job.started_at + job.timeout_s)
            self._running.append(job)
            threading.Thread(target=self._run, args=(job,), name=THREAD_NAME, daemon=True).start()

    def _run(self, job: Job) -> None:
        job.run()
        with self._waking:
            if not self._closed:
                self._wake()
