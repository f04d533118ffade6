"""Requests of the offline ``LLM`` while they run, as the caller sees them: their steps, or a bar of those that have
ended."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from fastdeploy.core.offline_outputs import RequestOutput

Step = tuple[int, RequestOutput]  # number of the prompt, and what was added


def iterate(
    num_prompts: int, steps: queue.SimpleQueue[Step | None], future: Future[Any]
) -> Iterator[list[RequestOutput | None]]:
    """Yield what was added, with one entry per prompt. Raises the error that ended the requests."""
    kept: list[Step | None] = []
    try:
        while (step := kept.pop() if kept else steps.get()) is not None:
            found: dict[int, RequestOutput] = {}
            while step is not None and step[0] not in found:
                found[step[0]] = step[1]
                if steps.empty():
                    break
                step = steps.get()
            else:
                kept.append(step)
            yield [found.get(i) for i in range(num_prompts)]
        future.result()
    finally:
        future.cancel()


class Progress:
    """A bar of the finished prompts, on a terminal."""

    def __init__(self, wanted: bool, total: int):
        self._bar = None
        if wanted and total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("prompts", total=total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
