"""Measure pauses of idle replicas: ``python -m benchmarks.fleet_pauses [--replicas 8 64 256]``.

The engines run in processes of their own, so the CPU time of this process is that of the gateway's client. A pause
sends four messages for each replica: call, fence, acknowledgement, report. At the end one replica in ten is killed, to
see how soon it is a member again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.lib.fleet.engines import EngineLauncher, FakeEngines
from benchmarks.lib.fleet.runner import Costs
from benchmarks.lib.report import plain_table
from fastdeploy.bench.stats import percentile
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many

IDLE_S = 3.0
HEADER = ("replicas", "start s", "pause ms: median", "p99", "CPU us for each: pause", "resume", "CPU while idle",
          "killed", "back s")  # fmt: skip


class Row(NamedTuple):
    """start_s: until all engines are members. pauses_ms: each call. cpu_ms: medians, of the gateway, for a pause and
    for a resume. idle: share of a core that is used while nothing happens. killed: number of engines that were
    killed. back_s: until all are members again."""

    replicas: int
    start_s: float
    pauses_ms: list[float]
    cpu_ms: tuple[float, float]
    idle: float
    killed: int
    back_s: float

    def cells(self) -> list[str]:
        cpu = [f"{1e3 * ms / self.replicas:.0f}" for ms in self.cpu_ms]
        pauses = [f"{percentile(self.pauses_ms, percent):.1f}" for percent in (50, 99)]
        last = [f"{self.idle:.1%}", str(self.killed), f"{self.back_s:.2f}"]
        return [str(self.replicas), f"{self.start_s:.2f}", *pauses, *cpu, *last]


async def measure(num: int, rounds: int, idle_s: float = IDLE_S) -> Row:
    """Start ``num`` engines, pause and resume them, kill one in ten, and wait until they are back."""
    config = FleetConfig(fleet_id="benchmark", fence_after_s=60.0, stall_s=60.0)
    began = time.monotonic()
    with FakeEngines(Costs(prompt_s=1e-6)) as engines:
        launcher, context = EngineLauncher(engines, num), context_of_many()
        client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint, context=context))
        client.start()
        try:
            await _until(lambda: len(client.membership.open) == num)
            start_s, cpu = time.monotonic() - began, time.process_time()
            await asyncio.sleep(idle_s)
            idle = (time.process_time() - cpu) / idle_s
            pauses, resumes = [], []
            for _ in range(rounds):
                pauses.append(await _timed(client, m.PauseArgs("keep", hold_id="benchmark"), num))
                resumes.append(await _timed(client, m.ResumeArgs("benchmark"), num))
            killed, began = launcher.names[: -(-num // 10)], time.monotonic()
            before = {name: _boot_id(client, name) for name in killed}
            await asyncio.gather(*(launcher.kill(name, 0.0) for name in killed))
            await _until(lambda: all(_boot_id(client, name) != boot_id for name, boot_id in before.items()))
            await _until(lambda: len(client.membership.open) == num)
            back_s = time.monotonic() - began
            await _timed(client, m.PauseArgs("keep", hold_id="benchmark"), num)
        finally:
            await client.close()
            context.destroy(linger=0)
    cpu_ms = median(cpu for cpu, _ in pauses), median(cpu for cpu, _ in resumes)
    return Row(num, start_s, [wall for _, wall in pauses], cpu_ms, idle, len(killed), back_s)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not condition():
            await asyncio.sleep(0.005)


def _boot_id(client: FleetClient, name: str) -> str | None:
    """Return the boot id of the last engine that was connected as this replica."""
    welcome = client.membership.replicas[name].client.welcome
    return None if welcome is None else welcome.boot_id


async def _timed(client: FleetClient, args: Any, num: int) -> tuple[float, float]:
    """Make a call to all replicas. Return the CPU time of this process and the time, in milliseconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    report = await client.call(args)
    took = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
    if [entry["status"] for entry in report["replicas"]] != ["done"] * num:
        raise RuntimeError(f"not all of {num} replicas did it: {report['replicas']}")
    return took


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    logging.getLogger("fastdeploy.fleet").setLevel(logging.CRITICAL)  # it tells of each replica that it loses
    print(plain_table(HEADER, [uvloop.run(measure(num, args.rounds)).cells() for num in args.replicas]))
    return 0


if __name__ == "__main__":
    main()
