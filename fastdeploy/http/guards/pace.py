"""Fair use of the event loop: the work for a large reply is done in slices, and other work runs between the slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

# Units of work. A unit is what it costs to make and encode one log probability: 0.5 to 1 microsecond.
SLICE = 2000
_encoder = msgspec.json.Encoder()


class Pace:
    """Counts the work for one reply, and lets the event loop run after each slice.

    turn: a lock that all replies of one event loop share. A reply that has used up its slice waits for the lock. So in
    each round of the event loop, at most one reply begins a further slice.
    """

    def __init__(self, turn: asyncio.Lock):
        self._turn = turn
        self._left = SLICE

    async def spend(self, work: int) -> None:
        """Count ``work`` units that were done, and let the event loop run if the slice is used up."""
        self._left -= work
        if self._left <= 0:
            self._left = SLICE
            await take_turn(self._turn)

    async def array(self, items: Iterable[Any], work: int = 1) -> msgspec.Raw:
        """Return the JSON array of ``items``, which are made and encoded slice by slice. work: units per item."""
        rest, parts = iter(items), []
        while batch := list(islice(rest, max(self._left // work, 1))):
            parts.append(_encoder.encode(batch)[1:-1])
            await self.spend(len(batch) * work)
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")


class GrowingArray:
    """A JSON array that is sent again whenever it has grown. Each item is made and encoded once."""

    def __init__(self, pace: Pace):
        self._pace = pace
        self._items = bytearray()

    async def extend(self, items: Iterable[Any], work: int = 1) -> None:
        """Append ``items``, see :meth:`Pace.array`."""
        new = memoryview(await self._pace.array(items, work))[1:-1]
        if new and self._items:
            self._items += b","
        self._items += new

    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join((b"[", self._items, b"]")))


async def take_turn(turn: asyncio.Lock) -> None:
    """Let the event loop run once. At most one caller with the same lock continues in each round of the event loop."""
    async with turn:
        await asyncio.sleep(0)
