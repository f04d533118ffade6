"""Work on weights beside the steps: jobs run one after another on a thread, and the loop takes their results in."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdeploy.errors import FastDeployError, OutOfSpace, WeightUpdateRefused

log = logging.getLogger("fastdeploy.engine")
THREAD_NAME = "stage-weights"


@dataclass
class Job:
    """``work`` runs on the thread; ``done(result, error, seconds)`` is called once on the loop's, by ``poll`` or
    ``drop``. owner: whose jobs ``drop`` drops. seconds: that ``work`` took.

    The result may be a second copy of the weights: nothing that outlives ``done`` may refer to the job, nor may an
    error to the frames it came through.
    """

    owner: object
    work: Callable[[], Any]
    done: Callable[[Any, FastDeployError | None, float], None]
    result: Any = None
    error: FastDeployError | None = None
    seconds: float = 0.0
    finished: bool = False

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self.work()
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
    """A queue of jobs. All methods are the loop thread's; ``wake`` is called from the other when a job has finished."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        self._waking = threading.Lock()  # what is woken is closed right after ``close``

    @property
    def busy(self) -> bool:
        return self._running is not None or bool(self._queue)

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        self._start_next()

    def drop(self, owner: object, error: FastDeployError) -> None:
        """Jobs of ``owner`` that have not begun are done, with ``error``; one that runs will be, when it ends."""
        dropped = [job for job in self._queue if job.owner is owner]
        self._queue = deque(job for job in self._queue if job.owner is not owner)
        for job in dropped:
            job.done(None, error, 0.0)

    def poll(self) -> None:
        """Call ``done`` of what has finished, and start what comes next."""
        while self._running is not None and self._running.finished:
            job, self._running = self._running, None
            job.done(job.result, job.error, job.seconds)  # which may drop what comes next
            del job
            self._start_next()

    def close(self, error: FastDeployError) -> None:
        """The engine ends: every job is done now, with ``error``, one that runs included."""
        with self._waking:
            self._closed = True
        jobs, self._queue = [*([self._running] if self._running else []), *self._queue], deque()
        self._running = None
        for job in jobs:
            job.done(None, error, 0.0)

    def _start_next(self) -> None:
        if self._running is None and self._queue and not self._closed:
            self._running = self._queue.popleft()
            threading.Thread(target=self._run, args=(self._running,), name=THREAD_NAME, daemon=True).start()

    def _run(self, job: Job) -> None:
        job.run()
        with self._waking:
            if not self._closed:
                self._wake()
