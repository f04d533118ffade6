"""A tree: relays between the gateway that leads and the engines, on hosts of their own in virtual time.

To the gateway a relay is one replica, so the gateway's code and its table of transactions are the real ones. A relay
passes each call on to its share of the engines, and answers with one report made of theirs; if one of them refuses,
with the refusal. Engines are connected to their relay only. Losses of engines behind a relay are not modelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from benchmarks.lib.fleet.hosts import Host, HostConnector, HostTransport, Network
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.fleet.reports import merge
from fastdeploy.inter_communicator import messages as m

BEAT_S = 1.0


class HostedRelay:
    """A relay on ``host`` with the engines behind ``connectors``. ready: called when all of them are connected; from
    then on it must be reachable."""

    def __init__(
        self, host: Host, network: Network, connectors: Sequence[HostConnector], ready: Callable[[HostTransport], None]
    ):
        self.host = host
        self._transport = HostTransport(host, network, host.name)
        self._ready = ready
        self._callers: set[str] = set()
        self._clients = [EngineClient(connector, None, kills_stalled=False) for connector in connectors]
        with host.here():
            self._tasks = {asyncio.get_running_loop().create_task(self._run())}

    async def _run(self) -> None:
        for client in self._clients:
            client.start()
        await asyncio.gather(*(client.connected.wait() for client in self._clients))
        self._ready(self._transport)
        self._tasks.add(asyncio.create_task(self._beat()))
        while True:
            for caller, message in await self._transport.receive():
                self._handle(caller, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for caller in self._callers:
                self._transport.send(caller, m.Heartbeat())

    def _handle(self, caller: str, message: object) -> None:
        if isinstance(message, m.Hello):
            welcome = self._clients[0].welcome
            assert welcome is not None
            self._callers.add(caller)
            self._transport.send(caller, replace(welcome, boot_id=self._transport.endpoint))
            return
        assert isinstance(message, m.Call)
        args = message.args
        if isinstance(args, m.CommitUpdateArgs):  # each engine has an id of its own, so it must find it by placed_by
            args = replace(args, session_id=None)
        answers = asyncio.gather(*(client.post(args, message.change) for client in self._clients))
        answers.add_done_callback(lambda done: self._answer(caller, message.call_id, done.result()))

    def _answer(self, caller: str, call_id: int, replies: list[m.Reply]) -> None:
        refusal = next((reply.failure for reply in replies if reply.failure is not None), None)
        self._transport.send(caller, m.Reply(call_id, merge([reply.result for reply in replies]), refusal))
