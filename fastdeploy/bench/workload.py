"""Seeded greedy requests with random token ids and ignore_eos, and the loops that send them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

MAX_PROMPT_ID = 254  # byte-level ids, which every checkpoint used here has


Result = TypeVar("Result")


def prompt_ids(seed: int | str, index: int, length: int) -> list[int]:
    """Return prompt number ``index`` of workload ``seed``. Prompts share a prefix only by chance."""
    rng = random.Random(f"{seed}/{index}")
    return [rng.randrange(MAX_PROMPT_ID + 1) for _ in range(length)]


def completion(model: str, prompt: list[int], max_tokens: int, request_id: str = "") -> dict[str, Any]:
    """Return the body of a streamed POST /v1/completions that runs to max_tokens and returns token ids."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if request_id:
        body["request_id"] = request_id
    return body


async def closed_loop(
    send: Callable[[int], Awaitable[Result]], count: int, clients: int, first: int = 0
) -> list[Result]:
    """Call ``send(first)`` to ``send(first + count - 1)`` by ``clients``. Each client makes its next call when its last
    one ended. Return the results by client, then in the order of starting."""
    indices = iter(range(first, first + count))

    async def client() -> list[Result]:
        return [await send(index) for index in indices]

    return [result for results in await asyncio.gather(*(client() for _ in range(clients))) for result in results]


async def open_loop(
    send: Callable[[int], Awaitable[Result]],
    count: int,
    rate: float,
    at_once: int | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[Result]:
    """Call ``send(0)`` to ``send(count - 1)`` at random times, ``rate`` in a second; infinite = all now. A slow answer
    does not delay later calls, unless ``at_once`` of them run. burstiness: 1 = Poisson arrivals, less = in bursts,
    more = evenly. Return the results in the order of starting."""
    rng, loop, at = random.Random(seed), asyncio.get_running_loop(), 0.0
    gate = asyncio.Semaphore(count if at_once is None else at_once)

    async def one(index: int) -> Result:
        async with gate:
            return await send(index)

    start, tasks = loop.time(), []
    for index in range(count):
        if math.isfinite(rate):
            await asyncio.sleep(start + at - loop.time())
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        tasks.append(asyncio.create_task(one(index)))
    return list(await asyncio.gather(*tasks))


class Clients:
    """``num`` clients that call ``one`` with their number again and again, from :meth:`go_on` to :meth:`rest`."""

    def __init__(self, num: int, one: Callable[[int], Awaitable[None]]) -> None:
        self._one = one
        self._may_run = asyncio.Event()
        self._busy = 0
        self._ended = asyncio.Event()  # one of the calls
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(num)]

    @property
    def resting(self) -> bool:
        """Whether no call may begin."""
        return not self._may_run.is_set()

    async def _run(self, number: int) -> None:
        while True:
            await self._may_run.wait()
            self._busy += 1
            try:
                await self._one(number)
            finally:
                self._busy -= 1
                self._ended.set()

    def go_on(self) -> None:
        self._may_run.set()

    async def rest(self) -> None:
        """Begin no more calls, and return when none is left. Raises the error that a client has ended with."""
        self._may_run.clear()
        while self._busy:
            self._ended.clear()
            await self._ended.wait()
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Cancel the calls that are left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
