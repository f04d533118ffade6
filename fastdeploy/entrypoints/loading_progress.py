"""The start of an engine, shown: by the engine to its supervisor and to the API servers, and by the supervisor on the
terminal or in the log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

import msgspec

from fastdeploy.core.loading import Loading, LoadingStage, write_loading
from fastdeploy.entrypoints.child import EventPipe

logger = logging.getLogger(__name__)
REPORT_S = 0.25  # between two reports of the engine in one stage
LOG_S = 5.0  # between two lines in a log


class LoadingReports:
    """The engine's side. Called with each state; tells the supervisor and the API servers, which read ``path``."""

    def __init__(self, events: EventPipe, path: str, clock: Callable[[], float] = time.monotonic):
        self._events, self._path, self._clock = events, path, clock
        self._stage: LoadingStage | None = None
        self._due = 0.0

    def __call__(self, state: Loading) -> None:
        now = self._clock()
        if state.stage is self._stage and now < self._due and state.done < state.total:
            return
        self._stage, self._due = state.stage, now + REPORT_S
        write_loading(self._path, state)
        self._events.send("loading", **msgspec.to_builtins(state))

    def end(self) -> None:
        """Say that the engine has started."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class LoadingLine:
    """The supervisor's side: one line that moves on a terminal, or one every LOG_S seconds in a log. So a short start
    has none there. moves: False = a log even on a terminal, since other servers write there, too."""

    def __init__(self, moves: bool = True, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = out or sys.stderr, clock
        self._moves = moves and self._out.isatty()
        self._due: float | None = None  # time of the next line in a log
        self._shown = False

    def show(self, state: Loading) -> None:
        if self._moves:
            self._out.write(f"\r\x1b[Kfastdeploy: {state}")
            self._out.flush()
            self._shown = True
            return
        now = self._clock()
        if self._due is not None and now >= self._due:
            logger.info("loading: %s", state)
        if self._due is None or now >= self._due:
            self._due = now + LOG_S

    def end(self) -> None:
        """Remove the line from a terminal."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._due, self._shown = None, False
