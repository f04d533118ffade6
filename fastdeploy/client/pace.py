"""Fair use of the event loop: the work for a large reply is done in slices, and other work runs between the slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

# Units of work. One unit is the time to make and encode one log probability: 0.5 to 1 microsecond.
SLICE = 2000
_encoder = msgspec.json.Encoder()


class Pace:
    """The pace of one reply: it counts the work, and lets the event loop run after each slice.

    slice_lock: shared by all replies of one event loop. A reply that has used up its slice waits for the lock, so at
    most one reply begins another slice in each round of the event loop.
    """

    def __init__(self, slice_lock: asyncio.Lock):
        self._slice_lock = slice_lock
        self._left = SLICE

    async def spend(self, work: int) -> None:
        """Count ``work`` units that were done, and let the event loop run if the slice is used up."""
        if not self.allows(work):
            await self.wait()

    def allows(self, work: int) -> bool:
        """Count ``work`` units that were done. False: the slice is used up, and the caller must :meth:`wait`."""
        self._left -= work
        return self._left > 0

    async def wait(self) -> None:
        """Let the event loop run, and begin the next slice."""
        self._left = SLICE
        await wait_for_slice(self._slice_lock)

    async def array(self, items: Iterable[Any], work: int = 1) -> msgspec.Raw:
        """Return the JSON array of ``items``, which are encoded slice by slice. work: units per item."""
        rest, parts = iter(items), []
        while batch := list(islice(rest, max(self._left // work, 1))):
            parts.append(_encoder.encode(batch)[1:-1])
            await self.spend(len(batch) * work)
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")

    async def columns(self, num: int, columns: dict[str, Iterable[Any]], work: int) -> Any:
        """Return an object of arrays of ``num`` items each, for an encoder of JSON. Only many items are encoded here.
        work: units for an item of each column."""
        if num * work < self._left:
            self._left -= num * work
            return {name: list(items) for name, items in columns.items()}
        return {name: await self.array(items, -(-work // len(columns))) for name, items in columns.items()}


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
        return msgspec.Raw(b"[" + self._items + b"]")


async def wait_for_slice(slice_lock: asyncio.Lock) -> None:
    """Let the event loop run once. No two calls return in the same round of the event loop."""
    async with slice_lock:
        await asyncio.sleep(0)
