"""The output of a run: the file events.jsonl, and a progress bar in a terminal."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_S = 8.0  # between two lines of progress


class Records:
    """Writes events.jsonl: one JSON object per line, whose ``t`` is the number of seconds since the run began.

    before: seconds of the run in earlier processes; None for a new run, which replaces the file. ledger: tokens of this
    process by what became of them: trained, discarded, in_flight, evaluated.
    """

    def __init__(self, path: Path, before: float | None):
        self._file = path.open("w" if before is None else "a", buffering=1)
        self._began = time.monotonic() - (before or 0.0)
        self.ledger = Counter(trained=0, discarded=0, in_flight=0, evaluated=0)

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._began

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"kind": kind, "t": round(self.now(), 4), **fields}) + "\n")


class Display(Progress):
    """Shows the last values of a run that may take so many minutes, and the time left: in a terminal beside a bar, else
    in a line every LINE_S seconds."""

    def __init__(self, minutes: float):
        console = Console(highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._text, self._shown = "the server starts", dict[str, object]()
        self._run = self.add_task(self._text, total=60 * minutes)
        self._began = time.monotonic()  # of the run
        self.set_time_left(60 * minutes, is_most=True)
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def start(self) -> None:
        super().start()
        if self.disable:
            self._lines.start()

    def stop(self) -> None:
        super().stop()
        self._ended.set()
        if self._lines.is_alive():
            self._lines.join()

    def show(self, seconds: float, **values: object) -> str:
        """Show new values beside the earlier ones. Returns the text. seconds: since the run began."""
        self._shown |= values
        self._began = time.monotonic() - seconds
        self._text = "  ".join(f"{name} {value}" for name, value in self._shown.items())
        self.update(self._run, completed=seconds, description=f"{self._text}  {self._left()}")
        return self._text

    def set_time_left(self, seconds: float, is_most: bool) -> None:
        """Note that the run ends in so many seconds. is_most: the run may end before, when it reaches its target."""
        self._ends_at, self._bound = time.monotonic() + seconds, "at most" if is_most else "about"

    def _left(self) -> str:
        return f"{self._bound} {max(self._ends_at - time.monotonic(), 0.0):.0f} s left"

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_S):
            self.console.print(f"{time.monotonic() - self._began:6.0f} s  {self._text}  {self._left()}")
