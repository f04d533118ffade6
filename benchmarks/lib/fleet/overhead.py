"""Measure the host time that the gateway's client adds to that of an EngineClient, without engines and sockets:
``python -m benchmarks.lib.fleet.overhead``."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, cast

from fastdeploy.client.connection import Connector
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.request_stream import Reader
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.fleet.router import Router
from fastdeploy.inter_communicator import messages as m

STREAMS, STEPS, RUNS = 32, 200, 15


class NoConnection:
    def send(self, message: m.ToEngine) -> None: ...


def connect(client: EngineClient) -> EngineClient:
    """Make a client that sends its messages nowhere."""
    client._connection = cast(Any, NoConnection())
    client.welcome = m.Welcome("boot", 0, 4096)
    client._first_connection = False
    client.connected.set()
    return client


def make_fleet(num: int) -> FleetClient:
    fleet = FleetClient(FleetConfig(fleet_id="f"), StaticLauncher([]), lambda placement: cast(Connector, None))
    for i in range(num):
        replica = Replica(Placement(f"r{i}", "", "", ""), cast(Connector, None), 1.0, lambda replica: None)
        connect(replica.client)
        replica.state, replica.slots = ReplicaState.MEMBER, 32
        fleet.membership.replicas[replica.name] = replica
    fleet._members_changed()
    return fleet


async def measure(client: EngineClient | FleetClient, engine: EngineClient | None, session: str) -> tuple[float, float]:
    """Return the microseconds of a submit, and of a token from its message to the reader's take. engine: that gets all
    outputs; None = outputs are not measured."""
    sampling, reader = SamplingParams(max_tokens=STEPS + 1, seed=1), Reader()
    adds = [AddRequest(f"r{i}", [i] * 512, sampling, session=session and f"{session}{i}") for i in range(STREAMS)]
    began = time.perf_counter()
    streams = [await client.submit(add, reader) for add in adds]
    submit = (time.perf_counter() - began) / STREAMS
    span, token = Span("v", 0, 0, 1), 0.0
    for _ in range(STEPS if engine else 0):
        assert engine is not None
        message = m.Outputs([m.Output(add.request_id, 0, [7], spans=[span]) for add in adds])
        began = time.perf_counter()
        engine._receive(message)
        taken = 0
        while taken < STREAMS:
            taken += sum(len(stream.take()) for stream in await reader.wait())
        token += time.perf_counter() - began
    for stream in streams:
        stream.close()
    for owner in (engine, client):
        if isinstance(owner, EngineClient):
            owner._cancelled.clear()
    return submit * 1e6, token / (STEPS * STREAMS) * 1e6


def measure_pick(fleet: FleetClient, session: str) -> float:
    """Return the microseconds of a pick alone. session: "" = new prompts without one, which look
    at every replica."""
    replicas, router = fleet.membership.open, Router()
    adds = [AddRequest("r", [i] * 512, SamplingParams(), session=session and f"{session}{i}") for i in range(STREAMS)]
    for add in adds if session else ():
        router.pick(add, replicas)  # a session gets its home
    began = time.perf_counter()
    for add in adds:
        router.pick(add, replicas)
    return (time.perf_counter() - began) / STREAMS * 1e6


async def main() -> None:
    engine = connect(EngineClient(cast(Connector, None)))
    one, fleets = make_fleet(1), {num: make_fleet(num) for num in (8, 256)}
    inner = next(iter(one.membership.replicas.values())).client
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(RUNS):
        rows.setdefault("EngineClient", []).append(await measure(engine, engine, ""))
        rows.setdefault("FleetClient, 1 replica", []).append(await measure(one, inner, "s"))
        inner._cancelled.clear()
        for num, fleet in fleets.items():
            for session in ("", "s"):
                name = f"FleetClient, {num} replicas, {'sessions' if session else 'no sessions'}"
                rows.setdefault(name, []).append(await measure(fleet, None, session))
                for replica in fleet.membership.replicas.values():
                    replica.client._cancelled.clear()
    for num, fleet in fleets.items():
        for session in ("", "s"):
            pick = statistics.median(measure_pick(fleet, session) for _ in range(RUNS))
            print(f"a pick alone, {num} replicas, {'sessions' if session else 'no sessions'}: {pick:.1f} us")
    for name, values in rows.items():
        submit, token = (statistics.median(value[k] for value in values) for k in (0, 1))
        print(f"{name:40} submit {submit:7.1f} us" + (f"   token {token:6.2f} us" if token else ""))


if __name__ == "__main__":
    asyncio.run(main())
