"""The output of a run: the file events.jsonl, and a progress bar in a terminal."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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
    """Shows the last values of a run that may take so many minutes. Without a terminal there is no bar."""

    def __init__(self, minutes: float):
        console = Console(highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._run = self.add_task("starts", total=60 * minutes)
        self._shown: dict[str, object] = {}

    def show(self, seconds: float, **values: object) -> str:
        """Show new values beside the earlier ones. Returns the text. seconds: since the run began."""
        self._shown |= values
        text = "  ".join(f"{name} {value}" for name, value in self._shown.items())
        self.update(self._run, completed=seconds, description=text)
        return text
