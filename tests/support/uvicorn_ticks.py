"""The pace of uvicorn in the process of the tests."""

from __future__ import annotations

import asyncio
from typing import Any

TICK_S = 0.005


class _ShortSleeps:
    """Stands in for asyncio in uvicorn/server.py, which only sleeps between two looks at the same condition."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, TICK_S))


def shorten_ticks() -> None:
    """Let servers of this process notice within TICK_S, not 0.1 s, that they should stop or that all connections are
    closed. Hundreds of tests stop a server."""
    import uvicorn.server

    uvicorn.server.asyncio = _ShortSleeps()
