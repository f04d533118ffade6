"""Asks engines for the truth, whatever the gateways believe."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineError
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

FLEET_STATE = m.FleetStateArgs()
ANSWER_S = 5.0
SILENT_S = 3600.0  # a stopped engine keeps its connection


class Witness:
    """Asks engines for the truth, on connections that no gateway knows. Use from one event loop only."""

    def __init__(self, placements: Sequence[Placement], context: zmq.Context[Any]):
        self._clients = {
            placement.name: EngineClient(
                ZmqConnector(placement.endpoint, context=context), SILENT_S, kills_stalled=False
            )
            for placement in placements
        }

    def start(self) -> None:
        for client in self._clients.values():
            client.start()

    async def ask(self, names: Collection[str], args: m.Args = FLEET_STATE) -> dict[str, dict[str, Any]]:
        """Return the answers to ``args``, by name, of those that answer."""
        answers = await asyncio.gather(*(self._ask(name, args) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def _ask(self, name: str, args: m.Args) -> dict[str, Any] | None:
        client = self._clients[name]
        try:
            async with asyncio.timeout(ANSWER_S):
                await client.connected.wait()
                return await client.call(args)
        except (EngineError, TimeoutError):
            return None

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
