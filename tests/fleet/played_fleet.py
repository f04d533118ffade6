"""A gateway with members without engines: the test plays these itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastdeploy.core.errors import EngineDead
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.fleet.replica import Replica, ReplicaEvent
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output

MAX_WAITING = 2  # at each engine


class PlayedConnection:
    """Keeps what the gateway sends. receive: lets the gateway get a message."""

    def __init__(self, client: Any):
        self.sent: list[m.ToEngine] = []
        self._client = client

    def send(self, message: m.ToEngine) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def output(self, request_id: str, tokens: list[int], choice: int = 0, **fields: Any) -> None:
        self._client._receive(m.Outputs([Output(request_id, choice, tokens, **fields)]))

    def reject(self, request_id: str, code: str) -> None:
        self._client._receive(m.Rejected(request_id, m.Failure(code, "why")))

    def reply(self, call: m.Call, **result: Any) -> None:
        self._client._receive(m.Reply(call.call_id, result))

    def refuse(self, call: m.Call, code: str) -> None:
        self._client._receive(m.Reply(call.call_id, {}, m.Failure(code, "why")))


class Fleet:
    """A FleetClient with ``num`` members without engines."""

    def __init__(self, num: int = 2, make_connection: Callable[[Any], PlayedConnection] = PlayedConnection):
        self._make_connection = make_connection
        self.client = FleetClient(
            FleetConfig(fleet_id="f", stall_s=1.0, fence_after_s=0.5), StaticLauncher([]), lambda placement: None
        )
        membership = self.client.membership
        membership.leadership.leads = True
        membership.joins.begin = lambda replica: None  # each replica joins at once, see connect
        self.replicas, self.engines = [], []
        for i in range(num):
            replica = Replica(Placement(f"r{i}", "", "", "here"), None, 1.0, membership._replica_changed)
            self.client.membership.replicas[replica.name] = replica
            self.replicas.append(replica)
            self.engines.append(None)
            self.connect(i)

    def connect(self, i: int) -> None:
        replica = self.replicas[i]
        self.engines[i] = replica.client._connection = self._make_connection(replica.client)
        replica.client.welcome, replica.client.model_info = (
            m.Welcome("b", 0, 100),
            {"max_num_seqs": 8, "max_waiting": MAX_WAITING},
        )
        replica.client._first_connection = False
        replica.client.connected.set()
        replica.client._on_connected()
        replica.advance(ReplicaEvent.JOINED)

    def lose(self, i: int) -> None:
        self.replicas[i].client._connection = None
        self.replicas[i].client._disconnect(EngineDead("it died"))

    async def settle(self) -> None:
        """Let the gateway send what waits."""
        while (task := self.client._dispatcher._task) is not None:
            await task


def in_loop(test: Callable[[Fleet], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def run() -> None:
        await test(Fleet())

    def wrapped() -> None:
        asyncio.run(run())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def request(name: str = "x", **fields: Any) -> AddRequest:
    sampling = fields.pop("sampling", SamplingParams(max_tokens=10, min_tokens=4, prompt_logprobs=1))
    return AddRequest(name, [1, 2, 3], sampling, **fields)
