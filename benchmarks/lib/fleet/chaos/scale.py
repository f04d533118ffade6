"""Pauses of idle replicas: what the gateway itself costs, by the number of replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.lib.fleet.chaos.figures import percentile
from benchmarks.lib.fleet.chaos.launcher import ChaosLauncher
from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.runner import Costs
from benchmarks.lib.report import plain_table
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many


@dataclass(frozen=True)
class Row:
    """start_s: until all engines are members. pauses_ms: each call. cpu_ms: of the gateway, for a pause and a resume.
    killed: number of engines that were killed. back_s: until all are members again."""

    replicas: int
    start_s: float
    pauses_ms: Sequence[float]
    cpu_ms: float
    killed: int
    back_s: float


async def measure(num: int, pauses: int) -> Row:
    """Start ``num`` engines, pause and resume them, kill one in ten, and wait until they are back."""
    config = FleetConfig(fleet_id="scale", fence_after_s=10.0, stall_s=60.0)
    began = time.monotonic()
    with FakeEngines(Costs(prompt_s=1e-6)) as engines:
        launcher, context = ChaosLauncher(engines, num), context_of_many()
        client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint, context=context))
        client.start()
        try:
            replicas = client.membership.replicas
            await _until(lambda: len(client.membership.open) == num)
            start_s, cpu = time.monotonic() - began, time.process_time()
            pauses_ms = [await _pause(client, num) for _ in range(pauses)]
            cpu_ms = (time.process_time() - cpu) * 1000 / pauses
            killed = launcher.names[: -(-num // 10)]
            began = time.monotonic()
            before = {name: _boot_id(replicas[name]) for name in killed}
            await asyncio.gather(*(launcher.kill(name, 0.0) for name in killed))
            await _until(lambda: all(_boot_id(replicas[name]) != boot_id for name, boot_id in before.items()))
            await _until(lambda: len(client.membership.open) == num)
            back_s = time.monotonic() - began
            await _pause(client, num)
        finally:
            await client.close()
            context.destroy(linger=0)
    return Row(num, start_s, pauses_ms, cpu_ms, len(killed), back_s)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not condition():
            await asyncio.sleep(0.005)


def _boot_id(replica: Replica) -> str | None:
    """Return the boot id of the last engine that was connected."""
    welcome = replica.client.welcome
    return None if welcome is None else welcome.boot_id


async def _pause(client: FleetClient, num: int) -> float:
    """Pause and resume. Return the milliseconds of the pause."""
    began = time.monotonic()
    report = await client.call(m.PauseArgs("keep", hold_id="scale"))
    elapsed_ms = (time.monotonic() - began) * 1000
    done = sum(entry["status"] == "done" for entry in report["replicas"])
    if done != num:
        raise RuntimeError(f"{done} of {num} replicas were paused")
    await client.call(m.ResumeArgs("scale"))
    return elapsed_ms


def table(rows: Sequence[Row]) -> str:
    """Return the figures. A pause sends one message to each replica, and gets one back."""
    header = ["replicas", "start s", "pause ms: median", "p99", "gateway CPU ms", "messages", "killed", "back s"]
    lines = [
        [
            str(row.replicas),
            f"{row.start_s:.2f}",
            f"{percentile(row.pauses_ms, 0.5):.1f}",
            f"{percentile(row.pauses_ms, 0.99):.1f}",
            f"{row.cpu_ms:.1f}",
            str(2 * row.replicas),
            str(row.killed),
            f"{row.back_s:.2f}",
        ]
        for row in rows
    ]
    return plain_table(lines, header)
