"""Control calls over all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy.client.engine_client import result_of
from fastdeploy.core.errors import EngineDead
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator import messages as m


class FleetControl:
    """Makes a control call on every replica of the quorum, and returns one answer. quorum: returns these replicas."""

    def __init__(self, quorum: Callable[[], Sequence[Replica]]):
        self._quorum = quorum

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make one call on all. Raises the first error."""
        replicas = self._quorum()
        if not replicas:
            raise EngineDead("no replica of the fleet is ready")
        futures = [replica.client.post(args) for replica in replicas]
        results = [result_of(reply) for reply in await asyncio.gather(*futures)]
        return results[0] | {"replicas": [{"name": r.name} for r in replicas]}
