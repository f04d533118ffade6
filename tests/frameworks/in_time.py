"""Calls that have to reach a server while it computes answers, however fast it is. For the children that run the
clients of frameworks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

ATTEMPTS = 20
T = TypeVar("T")


async def in_time(attempt: Callable[[], Awaitable[T | None]]) -> T:
    """Return the first result of ``attempt`` that is not None. None = the answers ended before the calls came."""
    for _ in range(ATTEMPTS):
        if (result := await attempt()) is not None:
            return result
    raise AssertionError(f"in {ATTEMPTS} attempts, answers ended before the calls came")


async def unless_done(tasks: Sequence[asyncio.Task], condition: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until ``condition`` is true. Return False if a task ends before."""
    while not any(task.done() for task in tasks):
        if await condition():
            return True
        await asyncio.sleep(0.005)
    return False


async def tokens_made(url: str) -> float:
    """Return how many tokens the server, or all replicas of a fleet, have sampled since the start."""
    return await counter(url, "generation_tokens_total")


async def aborted(url: str) -> float:
    """Return how many answers were aborted since the start."""
    return await counter(url, "request_finished_total", 'reason="abort"')


async def counter(url: str, name: str, label: str = "") -> float:
    """Return the sum of a counter over all replicas."""
    async with httpx.AsyncClient(timeout=60, verify=False) as client:  # fast to make
        lines = (await client.get(f"{url}/metrics")).raise_for_status().text.splitlines()
    counters = [line for line in lines if line.startswith(f"fastdeploy:{name}") and label in line]
    assert counters, f"the server has no counter {name}"
    return sum(float(line.split()[1]) for line in counters)


async def get(url: str, path: str) -> Any:
    """Return the result of a native control call."""
    async with httpx.AsyncClient(timeout=60, verify=False) as client:  # fast to make
        return (await client.get(url + path)).raise_for_status().json()["result"]
