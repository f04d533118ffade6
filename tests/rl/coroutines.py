"""Running a test's coroutine, and waiting in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastdeploy.rl.client import RolloutClient


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run ``coroutine`` in an event loop of its own. A test that hangs fails after two minutes."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def until_running(client: RolloutClient, count: int, *tasks: asyncio.Task) -> None:
    """Wait until ``count`` choices run on every replica, or all ``tasks`` are done."""
    for replica in client.replicas:
        while (await replica.call("GET", "/v1/is_paused"))["counts"]["running"] < count:
            if all(task.done() for task in tasks):
                return
            await asyncio.sleep(0.005)
