"""The file of ``--trace``: a JSON array of Chrome trace events, one on each line.

A thread of its own writes the file, so the loop never waits for the disk. Every batch of events is handed to the system
at once. The format allows an array without its end, so the file of a killed process can be opened too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from fastdeploy.core.events import Event, EventKind, EventLog
from fastdeploy.engine.views.trace_tracks import TraceEvent, Tracks

log = logging.getLogger("fastdeploy.engine")

MAX_BEHIND = 65536  # events that wait for the disk; more are dropped
MAX_STEPS_BEHIND = 512  # as many with a STEP, the largest kind, are dropped earlier


class TraceFile:
    """A sink of events that writes a trace. Nothing is overwritten: if ``path`` exists, the trace goes to the next free
    one of NAME.2.json, NAME.3.json ..., so every start of an engine has a file of its own. Only this user may read
    the file, since it names the requests and adapters of all clients.

    max_bytes: the trace ends when the file is as large. on_drop: called for each event that is dropped because the disk
    is slow. Raises OSError if the file cannot be made. A later failure of the disk ends the trace, not the engine.
    """

    wants_steps = True

    def __init__(self, path: str, max_bytes: int, boot_id: str, num_blocks: int, on_drop: Callable[[], None]):
        self._file = _create(Path(path))
        self.path = self._file.name
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._tracks = Tracks(os.getpid(), boot_id, num_blocks)
        self._encode = msgspec.json.Encoder().encode
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._reported_dropped = 0
        self._size = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()
        log.info("tracing to %s", self.path)

    def add(self, event: Event) -> None:
        if self._ended:
            return
        limit = MAX_STEPS_BEHIND if event.kind is EventKind.STEP else MAX_BEHIND
        if self._queue.qsize() < limit:
            self._queue.put(event)
        else:
            self._num_dropped += 1
            self._on_drop()

    def close(self) -> None:
        """Write what waits, and end the file. Waits at most 5 s for the disk."""
        self._queue.put(None)
        self._thread.join(5.0)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            self._write(self._tracks.drain())
            while batch := self._next_batch():
                self._write(self._tracks.begin(batch[0], time.strftime("%Y-%m-%dT%H:%M:%S%z")))
                self._write([out for event in batch for out in self._tracks.feed(event)])
                if (dropped := self._num_dropped) > self._reported_dropped:
                    missing, self._reported_dropped = dropped - self._reported_dropped, dropped
                    self._write(self._tracks.mark("events are missing here: the disk is slow", missing=missing))
                if self._size >= self._max_bytes:
                    log.warning("the trace %s ends: it has reached --trace-max-mb", self.path)
                    break
            self._finish()
        except OSError as error:
            log.warning("the trace %s ends: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.close()
        finally:
            self._ended = True
            self._drop_what_waits()

    def _next_batch(self) -> list[Event]:
        """Return the events that wait, at least one. An empty list: the trace was closed."""
        batch = []
        event = self._queue.get()
        while event is not None:
            batch.append(event)
            if len(batch) == MAX_STEPS_BEHIND or self._queue.empty():
                return batch
            event = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch

    def _write(self, events: list[TraceEvent]) -> None:
        if not events:
            return
        lines = (b",\n" if self._size else b"[\n") + b",\n".join(map(self._encode, events))
        self._file.write(lines)
        self._file.flush()
        self._size += len(lines)

    def _finish(self) -> None:
        self._write([*self._tracks.end(), *self._tracks.mark("trace ends", dropped=self._num_dropped)])
        self._file.write(b"\n]\n")
        self._file.close()

    def _drop_what_waits(self) -> None:
        while not self._queue.empty():
            self._queue.get()


@contextlib.contextmanager
def tracing(
    path: str, max_mb: int, events: EventLog, boot_id: str, num_blocks: int, on_drop: Callable[[], None]
) -> Iterator[None]:
    """Trace ``events`` to a file while the block runs. "" stands for no trace. If the file cannot be made, a warning is
    logged: an engine that is started again must not end because a disk is full."""
    if not path:
        yield
        return
    try:
        trace = TraceFile(path, max_mb << 20, boot_id, num_blocks, on_drop)
    except (OSError, ValueError) as error:  # ValueError: a path that no system call takes
        log.warning("there is no trace: %s", error)
        yield
        return
    events.attach(trace)
    try:
        yield
    finally:
        events.detach(trace)
        trace.close()


def _create(path: Path) -> IO[bytes]:
    number = 1
    while True:
        try:
            name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
            return open(name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        except FileExistsError:
            number += 1
