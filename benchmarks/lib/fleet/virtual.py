"""Engines and a gateway in virtual time: real code on an event loop whose clock jumps to the next event.

The engines are CommonEngines on a runner that takes no time. The outputs of a step arrive when the step's time has
passed on the clock. Nothing sleeps, so a busy machine changes no figure, and equal runs give equal figures.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from itertools import count
from typing import Any, TypeVar, TypeVarTuple
from unittest.mock import patch

from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.plan import NonFinite, Sampled, StepPlan, StepResult
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.fleet.router import Router
from fastdeploy.inter_communicator.messages import ToClient, ToEngine
from fastdeploy.inter_communicator.peer_transport import InprocPeerTransport
from fastdeploy.inter_communicator.transport import InprocConnection, InprocTransport
from fastdeploy.scheduler.drafts import NoDrafts

T = TypeVar("T")
Args = TypeVarTuple("Args")
QUIET_S = 1e6  # idle engines send no heartbeats: longer than any run
MESSAGE_S = 0.00025  # between two gateways
WALL_S, TICK_S = 1e6, 1e-9  # time.time() at the start, and what a call adds


class _NeverWait(selectors.SelectSelector):
    """Moves the clock instead of waiting. Sees no files."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and no event is left")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that jumps. Without other threads."""

    def __init__(self) -> None:
        self._clock = _NeverWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in virtual time. time.time() is virtual too, and returns no time twice: the order of requests, and
    that of sessions which begin together, depend on it."""
    runner, calls = asyncio.Runner(loop_factory=VirtualLoop), count()
    with runner, patch("time.time", lambda: WALL_S + runner.get_loop().time() + next(calls) * TICK_S):
        return runner.run(main)


class InstantRunner(SleepingRunner):
    """Adds up the time of its steps in ``spent_s`` instead of sleeping. Tokens differ between the
    sequences of a step."""

    def __init__(self, costs: Costs):
        super().__init__(costs)
        self.spent_s = 0.0

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult:
        cost = self._costs.of(plan)
        self.spent_s += cost
        first, vocabulary = plan.step_id * len(plan.chunks), self._costs.vocab_size - 1
        sampled: list[Sampled | NonFinite | None] = [
            Sampled([1 + (first + i) % vocabulary], []) if chunk.sample else None for i, chunk in enumerate(plan.chunks)
        ]
        return StepResult(plan.step_id, sampled, cost)


class VirtualEngine(InprocTransport):
    """An engine, and the transport to it."""

    def __init__(self, costs: Costs, config: EngineConfig):
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._runner = InstantRunner(costs)
        self._engine = CommonEngine(config, self._runner, self, clock=self._loop.time, drafter=NoDrafts())
        self._sent: list[tuple[str, ToClient]] = []  # by the step
        self._busy = False

    def post(self, client: str, message: ToEngine) -> None:
        super().post(client, message)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._round)

    def send(self, client: str, message: ToClient) -> bool:
        if not self._runner.spent_s:  # before the step
            return super().send(client, message)
        self._sent.append((client, message))
        return True

    def _beat(self) -> None:
        if not self._busy:
            self._engine.run_once(block=False)

    def _round(self) -> None:
        self._engine.run_once(block=False)
        scheduler = self._engine.scheduler
        self._busy = bool(self._runner.spent_s or scheduler.ended or scheduler.has_work)
        if self._busy:
            self._loop.call_later(self._runner.spent_s, self._step_ended)
        else:  # tells that it has nothing to do
            self._loop.call_later(self._engine.config.heartbeat_s, self._beat)

    def _step_ended(self) -> None:
        self._runner.spent_s = 0.0
        for client, message in self._sent:
            super().send(client, message)
        self._sent.clear()
        self._round()


class SlowPeerTransport(InprocPeerTransport):
    """Takes ``MESSAGE_S`` for each message between two gateways."""

    def __init__(self, endpoint: str):
        super().__init__(endpoint)
        self._under_way: deque[Callable[[], object]] = deque()  # timers of one moment are in no order

    def post(self, client: str, message: ToEngine) -> None:
        self._later(partial(super().post, client, message))

    def send(self, client: str, message: ToClient) -> bool:
        self._later(partial(super().send, client, message))
        return True

    def _later(self, deliver: Callable[[], object]) -> None:
        self._under_way.append(deliver)
        asyncio.get_running_loop().call_later(MESSAGE_S, lambda: self._under_way.popleft()())


class _Connector:
    def __init__(self, transport: InprocTransport):
        self._transport = transport

    def connect(self) -> InprocConnection | None:
        return self._transport.connect()

    def close(self) -> None: ...


async def start_fleet(num: int, routers: Sequence[Router], costs: Costs, config: EngineConfig) -> list[FleetClient]:
    """Return the gateways of a new fleet of ``num`` replicas, which have joined: one for each of ``routers``. The
    caller closes them. Call it in virtual time."""
    names = [f"replica-{i}" for i in range(num)]
    engines = {name: VirtualEngine(costs, config) for name in names}
    placements = [Placement(name, name, f"http://{name}", "here") for name in names]
    settings = FleetConfig(fleet_id="benchmark", stall_s=QUIET_S)
    peers = {f"gateway-{i}": SlowPeerTransport(f"gateway-{i}") for i in range(len(routers))}
    links = [PeerLink(peer, lambda address: _Connector(peers[address])) for peer in peers.values()]
    clients = [
        FleetClient(settings, StaticLauncher(placements), lambda at: _Connector(engines[at.name]), router, link)
        for router, link in zip(routers, links if len(routers) > 1 else [None], strict=True)
    ]
    for client in clients:
        client.start()
        while len(client.membership.open) < num:
            await asyncio.sleep(0.01)
    return clients
