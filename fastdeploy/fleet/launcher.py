"""Interface of what starts and ends replicas: the parent process on one host, or Ray on many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from fastdeploy.core.errors import ControlError


class Placement(msgspec.Struct, frozen=True):
    """A replica that was started. name: unique in the fleet, kept by a restart. endpoint: ZMQ address of its engine.
    url: of its API servers. host: id of the machine; replicas of one host share its memory and files."""

    name: str
    endpoint: str
    url: str
    host: str


class Launcher(Protocol):
    """Starts, restarts and ends replicas. A replica that dies is started again without being asked."""

    def placements(self) -> AsyncIterator[Sequence[Placement]]:
        """Yield the list of all replicas, now and after each change."""
        ...

    async def restart(self, name: str, why: str) -> None:
        """End the replica at once, even if its process is stopped, and start it again. Returns without waiting for
        the new one."""
        ...

    async def add(self) -> str:
        """Start one more replica. Return its name."""
        ...

    async def remove(self, name: str) -> None:
        """End the replica in an orderly way, and do not start it again."""
        ...

    async def close(self) -> None: ...


class StaticLauncher:
    """Replicas that somebody else runs. They cannot be restarted, added or removed from here."""

    def __init__(self, placements: Sequence[Placement]):
        self._placements = list(placements)

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield self._placements

    async def restart(self, name: str, why: str) -> None:
        return

    async def add(self) -> str:
        raise ControlError("this gateway does not start replicas: add one to its command line")

    async def remove(self, name: str) -> None:
        self._placements = [placement for placement in self._placements if placement.name != name]

    async def close(self) -> None:
        return
