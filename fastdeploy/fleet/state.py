"""The state that every member of the fleet has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.weight_source import WholeSource
from fastdeploy.inter_communicator.messages import LoadAdapterArgs, PauseArgs

ENGINE_TTL_SLACK_S = 30.0  # an engine ends a hold by itself so much later than the gateway would


@dataclass
class FleetHold:
    """A hold that stands on all members. args: with the hold's id, also for an anonymous hold, and without a ttl.
    expires_at: on the event loop's clock, when the gateway releases it; None = never."""

    args: PauseArgs
    expires_at: float | None = None


@dataclass
class FleetState:
    """What a replica must have before it may join. Changed by fleet/control.py only, and built anew from the replicas
    when a gateway starts.

    weight_epoch, version, fingerprint: of the weights that serve. source: the last whole source of these weights, which
    may be gone. holds: by (scope, id). adapters: by name, with the adapter epoch that serves. asleep: tags.
    revision: counts the changes. changing: calls or sessions that are changing the state now; nobody joins meanwhile.
    """

    weight_epoch: int = 0
    version: str = ""
    fingerprint: str | None = None
    source: WholeSource | None = None
    holds: dict[tuple[str, str], FleetHold] = field(default_factory=dict)
    adapters: dict[str, tuple[LoadAdapterArgs, int]] = field(default_factory=dict)
    asleep: tuple[str, ...] = ()
    revision: int = 0
    changing: int = 0

    def __post_init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("revision", "changing"):
            for waiter in self.__dict__.get("_waiters", ()):
                if not waiter.done():
                    waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true. Looked at after each change of ``revision`` or ``changing``."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def replace(self, other: FleetState) -> None:
        """Take over the content of ``other``, in a new revision."""
        self.weight_epoch, self.version, self.fingerprint = other.weight_epoch, other.version, other.fingerprint
        self.source, self.holds, self.adapters = other.source, other.holds, other.adapters
        self.asleep = other.asleep
        self.revision += 1
