"""A bounded amount that requests share, such as memory for bodies. Requests get their units in the order of asking."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from fastdeploy.core.errors import ServerBusy


class Budget:
    """An amount of ``total`` units that all requests of one event loop share. A caller waits up to ``wait_s`` seconds
    while too few units are free. limit: the name of the limit, for the error message."""

    def __init__(self, total: int, wait_s: float, limit: str):
        self._total = self._free = total
        self._wait_s = wait_s
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, units: int) -> int:
        """Wait for ``units``, or for ``total`` if that is less. Return how many units to :meth:`release`. Raises
        ServerBusy after ``wait_s`` seconds."""
        units = min(units, self._total)
        if not self._waiting and units <= self._free:
            self._free -= units
            return units
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, granted))
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the same round of the event loop
                self._free += units
            else:
                self._waiting.remove((units, granted))
            self._grant()
            if isinstance(error, TimeoutError):
                raise ServerBusy(f"waited too long for room within {self._limit}") from error
            raise
        return units

    def release(self, units: int) -> None:
        self._free += units
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            units, granted = self._waiting.popleft()
            self._free -= units
            granted.set_result(None)

    @contextlib.asynccontextmanager
    async def hold(self, units: int = 1) -> AsyncIterator[None]:
        """:meth:`acquire` the units, and release them when the block ends."""
        taken = await self.acquire(units)
        try:
            yield
        finally:
            self.release(taken)
