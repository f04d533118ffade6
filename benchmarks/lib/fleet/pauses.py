"""Measure a gateway's CPU time for pauses: ``python -m benchmarks.lib.fleet.pauses [--replicas 8 64 256]``.

The engines are idle and run in processes of their own, so the CPU time of this process is that of the gateway's client.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from statistics import median
from typing import NamedTuple

import uvloop

from benchmarks.lib.fleet.engines import FakeEngines
from benchmarks.lib.fleet.loads import ENGINE
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import StaticLauncher
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

IDLE_S = 3.0


class Times(NamedTuple):
    """Medians of a pause and of a resume, in ms, and the share of a core that is used while nothing happens."""

    pause_cpu_ms: float
    pause_ms: float
    resume_cpu_ms: float
    idle_share: float


async def measure(replicas: int, rounds: int, idle_s: float = IDLE_S) -> Times:
    """Pause and resume a fleet of idle engines, ``rounds`` times."""
    with FakeEngines() as engines:
        launcher = StaticLauncher(engines.start(replicas, **ENGINE))
        config = FleetConfig(fleet_id="benchmark", stall_s=60.0, fence_after_s=60.0)
        client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint))
        client.start()
        while len(client.membership.open) < replicas:
            await asyncio.sleep(0.01)
        try:
            began = time.process_time()
            await asyncio.sleep(idle_s)
            idle = (time.process_time() - began) / idle_s
            pauses, resumes = [], []
            for _ in range(rounds):
                pauses.append(await _timed(client, m.PauseArgs(mode="keep", hold_id="benchmark")))
                resumes.append(await _timed(client, m.ResumeArgs("benchmark")))
        finally:
            await client.close()
    cpu, wall = (median(pause[k] for pause in pauses) for k in (0, 1))
    return Times(cpu, wall, median(resume[0] for resume in resumes), idle)


async def _timed(client: FleetClient, args: m.Args) -> tuple[float, float]:
    """Make a call, and return the CPU time of this process and the time, in ms."""
    cpu, wall = time.process_time(), time.perf_counter()
    await client.call(args)
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    logging.getLogger("fastdeploy.fleet").setLevel(logging.ERROR)  # a closed gateway says that it loses its replicas
    for number in args.replicas:
        times = uvloop.run(measure(number, args.rounds))
        print(
            f"{number:5} replicas: a pause takes {times.pause_ms:7.1f} ms; CPU for each replica: "
            f"pause {times.pause_cpu_ms / number * 1e3:.0f} us, resume {times.resume_cpu_ms / number * 1e3:.0f} us; "
            f"idle: {times.idle_share:.1%} of a core"
        )


if __name__ == "__main__":
    main()
