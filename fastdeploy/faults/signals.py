"""What an API server tells its engine about faults, beside the messages: a small file, so that no message of the
product has a field for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

FILE = "engine.json"


class EngineSignals(msgspec.Struct, frozen=True):
    """keep_kv: commits leave KV as it is. clock_s: seconds that the wall clock is off."""

    keep_kv: bool = False
    clock_s: float = 0.0


def write_signals(folder: str, signals: EngineSignals) -> None:
    """Tell all engines of the server."""
    draft = Path(folder, f"{FILE}.new")
    draft.write_bytes(msgspec.json.encode(signals))
    os.replace(draft, Path(folder, FILE))


class SignalReader:
    """The engine's end. A file that has not changed is not read again."""

    def __init__(self, folder: str):
        self._path = os.path.join(folder, FILE)
        self._stamp: tuple[int, int] | None = None
        self._signals = EngineSignals()

    def read(self) -> EngineSignals:
        """Return what the file says now."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return EngineSignals()
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            self._signals = msgspec.json.decode(Path(self._path).read_bytes(), type=EngineSignals)
            self._stamp = stamp
        return self._signals


def shift_clock(offset_s: Callable[[], float]) -> None:
    """Let ``time.time`` of this process be off by ``offset_s()`` seconds. For the whole process; once."""
    real = time.time
    time.time = lambda: real() + offset_s()
