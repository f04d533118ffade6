"""The clock of an event loop, which a test may put ahead, so that no test waits for a time-out."""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Put the running event loop's clock ahead. What waits for at most ``seconds`` is overdue in the next turn."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
