"""Work on weights beside the steps: jobs run one after another, each on a thread, and the loop takes their results in.

A job may hang for ever in a read that the kernel does not end (a dead mount). It is given up then: its thread is left
behind and its result is dropped when it comes back. The next job has a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import FastDeployError, OutOfSpace, StagingTimeout, UpdateInProgress, WeightUpdateRefused

log = logging.getLogger("fastdeploy.engine")
THREAD_NAME = "stage-weights"
MAX_LEFT_BEHIND = 4


@dataclass
class Job:
    """``work`` runs on a thread; ``done(result, error, seconds)`` is called once, on the loop's. owner: whose jobs
    ``give_up`` ends. timeout_s: seconds that ``work`` may take. reads: ``work`` reads files that are not ours and may
    hang. seconds: that ``work`` took.

    The result may be a second copy of the weights: nothing that outlives ``done`` may refer to the job, nor may an
    error to the frames it came through.
    """

    owner: object
    work: Callable[[], Any] | None  # None once it has run: it refers to what it worked on
    done: Callable[[Any, FastDeployError | None, float], None]
    timeout_s: float
    reads: bool
    deadline: float = 0.0  # on the loop's clock, from when it is begun
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
        except Exception as error:  # whatever a reader of foreign files may raise: the old weights serve on
            log.warning("new weights could not be read", exc_info=True)
            self.error = WeightUpdateRefused(f"{type(error).__name__}: {error}")
        self.seconds = time.monotonic() - began
        self.finished = True


class StagingThread:
    """A queue of jobs. The loop's thread calls all methods; a job's thread calls ``wake`` when it has finished."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float]):
        self._wake, self._clock = wake, clock
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._left_behind: list[Job] = []
        self._closed = False
        self._waking = threading.Lock()  # no ``wake`` after ``close``: the transport is closed then

    @property
    def busy(self) -> bool:
        """A job runs or waits. Those that were given up do not count."""
        return self._running is not None or bool(self._queue)

    def check_room(self) -> None:
        """Raise UpdateInProgress while so many threads hang that no job that reads is begun."""
        number = sum(job.reads for job in self._left_behind)
        if number >= MAX_LEFT_BEHIND:
            raise UpdateInProgress(f"{number} reads that were given up still hang: another one begins when one ends")

    def next_deadline(self) -> float | None:
        return None if self._running is None else self._running.deadline

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        self._start_next()

    def give_up(self, owner: object, error: FastDeployError) -> None:
        """End the jobs of ``owner`` with ``error``. One that runs is left behind."""
        mine = [job for job in self._queue if job.owner is owner]
        self._queue = deque(job for job in self._queue if job.owner is not owner)
        if self._running is not None and self._running.owner is owner:
            self._leave_behind(self._running, error)
        for job in mine:
            job.done(None, error, 0.0)
        self._start_next()

    def poll(self) -> None:
        """Call ``done`` of what has finished or taken too long, and start what comes next."""
        self._left_behind = [job for job in self._left_behind if not job.finished]
        while (job := self._running) is not None:
            if job.finished:
                self._running = None
                job.done(job.result, job.error, job.seconds)  # which may drop what comes next
            elif job.deadline <= self._clock():
                why = f"the work on the weights took longer than {job.timeout_s:g} s (timeout_s, --stage-timeout-s)"
                log.error("%s; its thread is left behind", why)
                self._leave_behind(job, StagingTimeout(f"{why} and was given up"))
            else:
                return
            del job
            self._start_next()

    def close(self, error: FastDeployError) -> None:
        """End every job with ``error``, one that runs included: the engine ends."""
        with self._waking:
            self._closed = True
        jobs, self._queue = [*([self._running] if self._running else []), *self._queue], deque()
        self._running = None
        for job in jobs:
            job.done(None, error, 0.0)

    def _leave_behind(self, job: Job, error: FastDeployError) -> None:
        self._running = None
        self._left_behind.append(job)
        job.done(None, error, self._clock() - (job.deadline - job.timeout_s))

    def _start_next(self) -> None:
        while self._running is None and self._queue and not self._closed:
            job = self._queue.popleft()
            try:
                if job.reads:
                    self.check_room()
            except UpdateInProgress as error:
                job.done(None, error, 0.0)
                continue
            self._running, job.deadline = job, self._clock() + job.timeout_s
            threading.Thread(target=self._run, args=(job,), name=THREAD_NAME, daemon=True).start()

    def _run(self, job: Job) -> None:
        job.run()
        with self._waking:
            if not self._closed:
                self._wake()
