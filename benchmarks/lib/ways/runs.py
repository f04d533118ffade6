"""One measured run: a server of its own, the trainer of examples/async_grpo, and the engine's counters around it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.lib.ways.engine_main import TIMES_FILE
from benchmarks.lib.ways.record import RUN, TOKEN_TIMES, Completed, Engine, Way, completed
from examples.async_grpo.serving import CPU_THREADS
from fastdeploy.bench.client import Client, ServerError
from fastdeploy.testing import ServerProcess

TRAINER, CONTROL_TRAINER = "examples.async_grpo", "benchmarks.lib.ways.control_trainer"
READY_S, STOP_S = 120.0, 30.0
COUNTERS = {
    "generated": "fastdeploy:generation_tokens_total",
    "recomputed": "fastdeploy:recomputed_tokens",
    "preemptions": "fastdeploy:num_preemptions",
}
LEFT_OVER = ("fastdeploy:num_requests_running", "fastdeploy:num_requests_waiting")


class Plan(msgspec.Struct, frozen=True):
    """The settings that all runs share. server, trainer: flags. limit_s: of one run of the trainer, beyond which it
    hangs."""

    server: tuple[str, ...]
    trainer: tuple[str, ...]
    limit_s: float

    @property
    def settings(self) -> dict[str, str]:
        """The settings that must be equal if runs are to be compared."""
        return {"server": " ".join(self.server), "trainer": " ".join(self.trainer)}


def folder_of(out: Path, way: Way, seed: int) -> Path:
    name = "-".join([way.sync, way.kv, *(["stale"] if way.stale_kv else [])])
    return out / name / f"seed-{seed}"


def is_done(plan: Plan, folder: Path) -> bool:
    """Return whether ``folder`` has a complete run with the settings of ``plan``."""
    done = completed(folder)
    return done is not None and done.settings == plan.settings


def run(plan: Plan, way: Way, seed: int, folder: Path) -> None:
    """Make one run into ``folder``, whose earlier content is removed. Raises ServerError, WireError, OSError or
    TimeoutError if the server cannot be driven, subprocess.SubprocessError if the trainer fails or hangs."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    variables = {TIMES_FILE: str(folder.resolve() / TOKEN_TIMES), "FASTDEPLOY_CPU_THREADS": CPU_THREADS}
    command = [sys.executable, "-m", "benchmarks.lib.ways.engine_main", "serve", *plan.server]
    if way.stale_kv:
        schedule = folder.resolve() / "faults.json"
        schedule.write_bytes(msgspec.json.encode({"fault": "kv_kept", "times": 0}))
        command += ["--faults", str(schedule)]
    with ServerProcess(command, variables, folder / "server.log") as server:
        server.wait_ready(READY_S)
        before = counters(server.url)
        train(plan, way, seed, server.url, folder)
        after = counters(server.url)
        server.stop(timeout_s=STOP_S)  # the engine writes its times at its end
    engine = Engine(**{name: after[name] - before[name] for name in COUNTERS})
    (folder / RUN).write_bytes(
        msgspec.json.encode(Completed(way=way, seed=seed, settings=plan.settings, engine=engine))
    )


def train(plan: Plan, way: Way, seed: int, url: str, folder: Path) -> None:
    module = CONTROL_TRAINER if way.stale_kv else TRAINER
    command = [sys.executable, "-m", module, "--url", url, "--out", str(folder), "--seed", str(seed)]
    command += ["--sync", way.sync, "--kv", way.kv, *plan.trainer]
    with (folder / "trainer.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=plan.limit_s)


def counters(url: str) -> dict[str, int]:
    """Return the engine's counters. Raises ServerError if requests are left: their tokens could not be accounted
    for."""
    values = asyncio.run(Client(url).metrics())
    if any(values[name] for name in LEFT_OVER):
        raise ServerError("requests are left in the engine")
    return {name: int(values[metric]) for name, metric in COUNTERS.items()}


def missing(plan: Plan, out: Path, ways: Sequence[Way], seeds: Sequence[int]) -> list[tuple[Way, int]]:
    """Return the runs that are still to be made: all ways with one seed, then with the next, since the speed of a
    machine changes over the hours."""
    return [(way, seed) for seed in seeds for way in ways if not is_done(plan, folder_of(out, way, seed))]
