"""Staging new weights beside the serving ones, on a thread of its own; the engine commits them between two steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdeploy.errors import FastDeployError, InvalidField, UpdateInProgress, WeightUpdateRefused
from fastdeploy.inter_communicator.messages import UpdateWeightsArgs
from fastdeploy.scheduler.interface import Runner

Answer = Callable[[dict[str, Any], FastDeployError | None], None]


@dataclass
class Update:
    """One update from its call to its answer. ``staged`` or ``error`` is set when ``done``."""

    args: UpdateWeightsArgs
    answer: Answer
    started_at: float
    staged: Any = None
    error: FastDeployError | None = None
    staged_at: float = 0.0
    done: bool = False

    def timings_ms(self, began: float, ended: float) -> dict[str, float]:
        """Milliseconds of each part; began, ended: of the commit, on time.monotonic()."""
        parts = {
            "stage": self.staged_at - self.started_at,
            "wait_for_step": began - self.staged_at,
            "commit": ended - began,
            "total": ended - self.started_at,
        }
        return {name: round(seconds * 1000, 3) for name, seconds in parts.items()}


class WeightUpdater:
    """At most one update at a time. Until the engine commits it, nothing that serves has changed."""

    def __init__(self, runner: Runner, roots: tuple[str, ...], wake: Callable[[], None]):
        self._runner = runner
        self._roots = [os.path.realpath(root) for root in roots]
        self._wake = wake
        self._update: Update | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._update is not None

    def start(self, args: UpdateWeightsArgs, answer: Answer) -> None:
        """Begin staging. Raises InvalidField or UpdateInProgress, and does nothing, if it cannot."""
        if args.kv not in ("keep", "recompute"):
            raise InvalidField("kv", f"expected keep or recompute, got {args.kv!r}")
        self._check_path(args.source.path)
        if self._update is not None:
            raise UpdateInProgress("another weight update is being staged; try again when it has been answered")
        self._update = Update(args, answer, time.monotonic())
        threading.Thread(target=self._stage, args=(self._update,), name="stage-weights", daemon=True).start()

    def _check_path(self, path: str) -> None:
        if "\0" in path:
            raise InvalidField("model_path", "expected a path, got a string with a zero byte")
        real = os.path.realpath(path)
        if not any(os.path.commonpath([real, root]) == root for root in self._roots):
            raise InvalidField("model_path", f"{path!r} is not under an allowed root (--model-root)")
        if not os.path.isdir(real):
            raise InvalidField("model_path", f"{path!r} is not a folder")

    def _stage(self, update: Update) -> None:
        try:
            staging = self._runner.begin_update(partial=False, in_place=False)
            staging.add(update.args.source, {})
            update.staged = staging.finish()
        except FastDeployError as error:
            update.error = error
        except Exception as error:  # whatever a reader of foreign files may raise: the old weights serve on
            update.error = WeightUpdateRefused(f"{type(error).__name__}: {error}")
        update.staged_at = time.monotonic()
        update.done = True
        if not self._closed:
            self._wake()

    @property
    def staged(self) -> Update | None:
        """The update whose staging has ended, well or not, until :meth:`finish`."""
        return self._update if self._update is not None and self._update.done else None

    def finish(self, result: dict[str, Any], error: FastDeployError | None) -> None:
        """Answer the caller; the next update may start."""
        assert self._update is not None
        update, self._update = self._update, None
        update.answer(result, error)

    def fail(self, error: FastDeployError) -> None:
        """The engine cannot go on: answer whoever waits."""
        self._closed = True  # what it wakes is closed next
        if self._update is not None:
            self.finish({}, error)
