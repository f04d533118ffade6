"""A launcher of fake engines, which can harm them too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from benchmarks.lib.fleet.engines import FakeEngines
from fastdeploy.core.process import host_id
from fastdeploy.fleet.launcher import Placement


@dataclass(frozen=True)
class Restart:
    """A restart that the gateway asked for. harm: what was done to the engine before; "" = nothing."""

    name: str
    why: str
    harm: str


class EngineLauncher:
    """Starts ``num`` engines, for any number of gateways in one event loop. settings: of EngineConfig.

    harmed: by name, what was done to the engine of a replica since it was started. restarts: in their order.
    delays: by name, seconds before the next restart, in which the cut-off engine may run on."""

    def __init__(self, engines: FakeEngines, num: int, **settings: Any):
        self._engines = engines
        self.listed = [replace(placement, host=host_id()) for placement in engines.start(num, **settings)]
        self._numbers = {placement.name: i for i, placement in enumerate(self.listed)}
        self.harmed: dict[str, str] = {}
        self.restarts: list[Restart] = []
        self.delays: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    # ------------------------------------------------------------------ see Launcher

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield self.listed

    async def restart(self, name: str, why: str) -> None:
        self.restarts.append(Restart(name, why, self.harmed.get(name, "")))
        await asyncio.sleep(self.delays.pop(name, 0.0))
        await self._renew(name)

    async def add(self) -> str:
        raise NotImplementedError("the number of these engines is fixed")

    async def remove(self, name: str) -> None:
        raise NotImplementedError("the number of these engines is fixed")

    async def close(self) -> None:
        return

    # ------------------------------------------------------------------ harm

    async def kill(self, name: str, down_s: float) -> None:
        """Kill an engine. A new one starts after ``down_s`` seconds, if nobody else has started one."""
        self.harmed[name] = "killed"
        await asyncio.to_thread(self._engines.kill, self._numbers[name])
        await asyncio.sleep(down_s)
        if not self._engines.alive(self._numbers[name]):
            await self._renew(name)

    async def stop(self, name: str, seconds: float) -> None:
        """Stop the process of an engine for some time. A restart ends that too."""
        self.harmed[name] = "stopped"
        await asyncio.to_thread(self._engines.stop, self._numbers[name])
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._engines.cont, self._numbers[name])
        self._healed(name, "stopped")

    async def slow(self, name: str, factor: float, seconds: float) -> None:
        """Let the steps of an engine take ``factor`` times their time, for some time. A restart ends that too."""
        self.harmed[name] = "slowed"
        self._engines.slow(self._numbers[name], factor)
        await asyncio.sleep(seconds)
        self._engines.slow(self._numbers[name], 1.0)
        self._healed(name, "slowed")

    def _healed(self, name: str, harm: str) -> None:
        if self.harmed.get(name) == harm:
            del self.harmed[name]

    async def _renew(self, name: str) -> None:
        self._engines.slow(self._numbers[name], 1.0)
        await asyncio.to_thread(self._engines.restart, self._numbers[name])
        self.harmed.pop(name, None)
