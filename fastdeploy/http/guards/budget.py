"""A bounded amount of something that requests share, handed out in the order in which they asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from fastdeploy.core.errors import ServerBusy


class Budget:
    """``total`` units for all requests of one event loop. A caller that finds too few left waits in line for up to
    ``wait_s`` seconds. ``what`` names the units in the error."""

    def __init__(self, total: int, wait_s: float, what: str):
        self._total = self._free = total
        self._wait_s = wait_s
        self._what = what
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, units: int) -> int:
        """Wait for ``units``, or for all that there are if these are fewer. Return how many to :meth:`give` back.
        Raises ServerBusy when the wait has been too long."""
        units = min(units, self._total)
        if not self._line and units <= self._free:
            self._free -= units
            return units
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((units, turn))
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self._free += units
            else:
                self._line.remove((units, turn))
            self._grant()
            if isinstance(error, TimeoutError):
                raise ServerBusy(f"no room among {self._what}") from error
            raise
        return units

    def give(self, units: int) -> None:
        self._free += units
        self._grant()

    def _grant(self) -> None:
        while self._line and self._line[0][0] <= self._free:
            units, turn = self._line.popleft()
            self._free -= units
            turn.set_result(None)

    @contextlib.asynccontextmanager
    async def hold(self, units: int = 1) -> AsyncIterator[None]:
        """:meth:`take` for as long as the block lasts."""
        taken = await self.take(units)
        try:
            yield
        finally:
            self.give(taken)
