"""Adapters that requests name and that the fleet does not have: looked up in the engines' adapter root.

A lookup is a load of the whole fleet, so all members have the same adapter with the same number. One member is asked
first whether the folder is there. A name that nobody has changes nothing, and keeps no replica from joining.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastdeploy.core.errors import (
    EngineDead,
    FastDeployError,
    ModelNotFound,
    NotLeader,
    UpdateInProgress,
    WrongOrder,
)
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

MAX_LOOKUPS = 64  # at a time. Engines bound the reads, but not the names that wait for one


class Lookups:
    """Looks adapters up, each name once at a time. state: of the fleet. members: those that take part in calls. call:
    makes a call on them. ended(name, error): called after a lookup. With an error, the requests for the name must fail;
    without one, they can be sent, or must be looked at again."""

    def __init__(
        self,
        state: FleetState,
        members: Callable[[], Sequence[Replica]],
        call: Callable[[m.Args], Awaitable[dict[str, Any]]],
        ended: Callable[[str, FastDeployError | None], None],
    ):
        self._state, self._members, self._call, self._ended = state, members, call, ended
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loads: Counter[str] = Counter()

    def ready(self, name: str) -> bool:
        """Return whether a request for an adapter may be sent now ("" = for the base model). If the adapter must be
        looked up, begin to do so, or wait for a load of the name. Raises UpdateInProgress if too many names are being
        looked up."""
        if not name or name in self._state.adapters:
            return True
        if not any(replica.client.model_info.get("has_adapter_root") for replica in self._members()):
            return True  # an engine refuses it
        if name not in self._running and not self._loads[name]:
            if len(self._running) >= MAX_LOOKUPS:
                raise UpdateInProgress(f"{MAX_LOOKUPS} adapters are being looked up; try again after that")
            self._running[name] = asyncio.get_running_loop().create_task(self._look_up(name), name="fleet-lookup")
        return False

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Let requests for an unknown name wait for a load that a client makes meanwhile."""
        self._loads[name] += 1
        try:
            yield
        finally:
            self._loads[name] -= 1
            self._loads += Counter()  # forgets what is 0

    async def settled(self, name: str) -> None:
        """Wait until no lookup of this name runs. A load begins after that."""
        while (task := self._running.get(name)) is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """End all lookups."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, name: str) -> None:
        error: FastDeployError | None = None
        try:
            path = (await self._call(m.LookUpAdapterArgs(name)))["path"]
            await self._call(m.LoadAdapterArgs(name, FolderSource(path), path=path, lookup=True))
        except (EngineDead, NotLeader, WrongOrder):  # members were lost, or a reset has dropped the load
            pass
        except ModelNotFound as missing:
            error = ModelNotFound(missing.message, param="model")
        except FastDeployError as refused:
            error = refused
        finally:
            del self._running[name]
        self._ended(name, error)
