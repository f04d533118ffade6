"""The replicas of the fleet, and their way into it and out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastdeploy.client.connection import Connector
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Launcher, Placement
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState

MakeConnector = Callable[[Placement], Connector]


class Membership:
    """Follows the launcher, connects to every replica, and lets it join. changed: called after each change of the
    members. connector: makes the connector to a replica's engine."""

    def __init__(self, config: FleetConfig, launcher: Launcher, connector: MakeConnector, changed: Callable[[], None]):
        self._config = config
        self._launcher = launcher
        self._connector = connector
        self._changed = changed
        self.replicas: dict[str, Replica] = {}

    @property
    def quorum(self) -> list[Replica]:
        """The replicas that take part in control calls."""
        return [replica for replica in self.replicas.values() if replica.in_quorum]

    @property
    def open(self) -> list[Replica]:
        """The replicas that take new requests."""
        return [replica for replica in self.replicas.values() if replica.state is ReplicaState.MEMBER]

    async def run(self) -> None:
        """Follow the launcher until this is cancelled."""
        async for placements in self._launcher.placements():
            for placement in placements:
                if placement.name not in self.replicas:
                    connector = self._connector(placement)
                    replica = Replica(placement, connector, self._config.stall_s, self._replica_changed)
                    self.replicas[placement.name] = replica
                    replica.client.start()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Close all connections. The replicas run on."""
        await asyncio.gather(*(replica.client.close() for replica in self.replicas.values()))
        await self._launcher.close()

    def fence(self, replica: Replica, why: str) -> None:
        """Cut ``replica`` off at once, and have it restarted. Its open requests fail with EngineDead."""
        raise NotImplementedError

    def _replica_changed(self, replica: Replica) -> None:
        if replica.state is ReplicaState.JOINING:
            replica.advance(ReplicaEvent.JOINED)
        self._changed()
