"""Running a test's coroutine, and waiting in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastdeploy.rl.client import RolloutClient

HANGS_S = 110  # shorter than the time-out of a test


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run ``coroutine`` in an event loop of its own. A test that hangs fails after two minutes, and prints where each
    task waits."""

    async def bounded() -> Any:
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait([task], timeout=HANGS_S)
        if not task.done():
            for waiting in asyncio.all_tasks():
                waiting.print_stack()
        assert task.done(), f"not done within {HANGS_S} s"
        return task.result()

    return asyncio.run(bounded())


async def until_running(client: RolloutClient, count: int, *tasks: asyncio.Task) -> None:
    """Wait until ``count`` choices run, or all ``tasks`` are done."""
    while (await client.connection.call("GET", "/v1/is_paused"))["counts"]["running"] < count:
        if all(task.done() for task in tasks):
            return
        await asyncio.sleep(0.005)
