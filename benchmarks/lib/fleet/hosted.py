"""A fleet whose gateways, relays and engines are on hosts of their own in virtual time (see hosts.py)."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any

from benchmarks.lib.fleet.hosts import Host, HostConnector, HostTransport, Network
from benchmarks.lib.fleet.relays import HostedRelay
from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from fastdeploy.core.config import EngineConfig
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, WithoutRoll
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.inter_communicator import messages as m
from fastdeploy.scheduler.drafts import NoDrafts

COSTS = Costs(prompt_s=1e-6, num_blocks=512)
ENGINE = EngineConfig(model="sleeping", model_roots=("/",))
POLL_S = 0.01


class HostedEngine:
    """An engine without requests on ``host``, at ``endpoint``. read_s: time in which it reads new weights. It runs
    until :meth:`kill`."""

    def __init__(self, host: Host, endpoint: str, network: Network, read_s: float):
        self.transport = HostTransport(host, network, endpoint)
        self._loop, self._host, self._read_s = asyncio.get_running_loop(), host, read_s
        self._staged = threading.Event()
        self.transport.wake = self._staged.set  # type: ignore[method-assign]
        self.transport.woken = self._wake
        self._waits = self._is_dead = False
        self.engine = CommonEngine(
            ENGINE, SleepingRunner(COSTS), self.transport, uuid.uuid4().hex, clock=self._loop.time, drafter=NoDrafts()
        )
        with host.here():
            self._loop.call_soon(self._beat)

    def kill(self) -> None:
        self._is_dead = True
        self.transport.close()

    def _wake(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.call_soon(self._round)

    def _beat(self) -> None:
        if not self._is_dead:
            self._wake()
            self._loop.call_later(ENGINE.heartbeat_s, self._beat)

    def _round(self) -> None:
        self._waits = False
        if self._is_dead:
            return
        self.engine.run_once(block=False)
        if self.engine.weights.thread.next_deadline() is not None:  # a thread reads weights, which takes no time here
            self._staged.wait()
            self._staged.clear()
            self._waits = True
            self._loop.call_later(self._read_s, self._round)


class HostedGateway:
    """A gateway on a host of its own."""

    def __init__(self, host: Host, client: FleetClient, transport: HostTransport):
        self.host, self.client, self._transport = host, client, transport

    def start(self) -> None:
        with self.host.here():
            self._task = self.client.start()

    def raise_error(self) -> None:
        """Raise the error with which the gateway's task has ended."""
        if self._task.done():
            self._task.result()

    def kill(self) -> None:
        """End the process of this gateway."""
        self.host.is_dead = True
        for connection in list(self.host.connections):
            connection.close()
        self._transport.close()

    @property
    def leads(self) -> bool:
        return not self.host.is_dead and self.client.membership.leadership.leads

    async def call(self, args: m.Args) -> dict[str, Any]:
        with self.host.here():
            call = asyncio.get_running_loop().create_task(self.client.call(args))
        return await call


class HostedFleet(WithoutRoll):
    """``num`` engines and ``num_gateways`` gateways. relays: between them; 0 = none. boot_s: from the end of an engine
    to the start of the next one at its endpoint. read_s: see HostedEngine. As a launcher: it restarts engines.

    names: of the engines. replicas: names of what the gateways are connected to."""

    def __init__(
        self,
        num: int,
        num_gateways: int,
        network: Network,
        config: FleetConfig,
        relays: int = 0,
        boot_s: float = 1.0,
        read_s: float = 1.0,
    ):
        self.network, self.config, self._boot_s, self._read_s = network, config, boot_s, read_s
        self.names = [f"replica-{i}" for i in range(num)]
        self.hosts = {name: Host(name) for name in self.names}
        self.engines: dict[str, HostedEngine] = {}
        self._transports: dict[str, HostTransport] = {}
        self._numbers = count()
        self._random = random.Random(0)
        self.gateways = [self._gateway(i) for i in range(num_gateways)]
        self.relays = [self._relay(Host(f"relay-{i}"), self.names[i::relays]) for i in range(relays)]
        self.relay_hosts = [relay.host for relay in self.relays]
        self.replicas = [host.name for host in self.relay_hosts] or self.names

    def _relay(self, host: Host, names: Sequence[str]) -> HostedRelay:
        with host.here():
            connectors = [self._connector(name) for name in names]
            return HostedRelay(host, self.network, connectors, lambda there: self._listen(host.name, there))

    def _listen(self, name: str, transport: HostTransport) -> None:
        self._transports[name] = transport

    def _gateway(self, i: int) -> HostedGateway:
        host = Host(f"gateway-{i}")
        with host.here():
            transport = self._transports[host.name] = HostTransport(host, self.network, host.name)
            link = PeerLink(transport, self._connector)
            client = FleetClient(self.config, self, lambda at: self._connector(at.endpoint), link=link)
            return HostedGateway(host, client, transport)

    def _connector(self, endpoint: str) -> HostConnector:
        return HostConnector(self.network, self._transports, endpoint, self._numbers)

    # ------------------------------------------------------------------ see Launcher

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        yield [Placement(name, name, f"http://{name}", name) for name in self.replicas]

    async def restart(self, name: str, why: str) -> None:
        if name in self.engines:
            self.kill([name])

    async def add(self) -> str:
        raise NotImplementedError("the number of these engines is fixed")

    async def remove(self, name: str) -> None:
        raise NotImplementedError("the number of these engines is fixed")

    async def close(self) -> None: ...

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start all gateways, and all engines within a second."""
        for gateway in self.gateways:
            gateway.start()
        self._boot(self.names, 0.0)

    def _boot(self, names: Sequence[str], after_s: float) -> None:
        loop = asyncio.get_running_loop()
        for name in names:
            loop.call_later(after_s + self._random.random(), self._boot_one, name)

    def _boot_one(self, name: str) -> None:
        self.engines[name] = engine = HostedEngine(self.hosts[name], name, self.network, self._read_s)
        self._listen(name, engine.transport)

    def kill(self, names: Sequence[str]) -> None:
        """Kill engines. Each starts again after its time, with its first weights."""
        for name in names:
            del self._transports[name]
            self.engines.pop(name).kill()
        self._boot(names, self._boot_s)

    @property
    def leader(self) -> HostedGateway:
        return next(gateway for gateway in self.gateways if gateway.leads)

    @property
    def complete(self) -> bool:
        """Whether all living gateways have all members."""
        living = [gateway for gateway in self.gateways if not gateway.host.is_dead]
        return all(len(gateway.client.membership.open) == len(self.replicas) for gateway in living)

    async def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(POLL_S)
                for gateway in self.gateways:
                    gateway.raise_error()
