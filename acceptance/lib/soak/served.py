"""The processes of a soak: its server, by role, and those that it talks to by lines of JSON, trainer and reference."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastdeploy.bench.client import Client
from fastdeploy.testing import ServerProcess

ROOT = Path(__file__).resolve().parents[3]
MODULES = {
    "engine": "fastdeploy.entrypoints.engine_main",
    "api": "fastdeploy.entrypoints.api_server",
    "supervisor": "fastdeploy.entrypoints.cli",
}
WORKERS = 2
MAX_NUM_SEQS = 8  # fewer than rollouts in flight, so that some wait
KV_BLOCKS = 72  # fewer than eight long rollouts need, so that some are preempted
READY_S, END_S = 600.0, 20.0


def python_path() -> str:
    """Return PYTHONPATH for a process that imports these programs."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Server:
    """``fastdeploy serve`` with all its files below ``folder``."""

    def __init__(self, folder: Path):
        self.folders = {name: folder / name for name in ("uploads", "spill", "adapters", "temporary")}
        for path in self.folders.values():
            path.mkdir()
        uploads, spill, adapters, temporary = map(str, self.folders.values())
        command = [sys.executable, "-m", MODULES["supervisor"], "serve", "--workers", str(WORKERS)]
        command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--num-gpu-blocks-override", str(KV_BLOCKS)]
        command += ["--max-model-len", "1024", "--max-retained", "100000", "--standby-weights", "on"]
        command += ["--stall-s", "120"]  # an engine that gets no time from a busy machine is not stuck
        command += ["--upload-dir", uploads, "--spill-dir", spill, "--adapter-store", adapters]
        environment = {"FASTDEPLOY_CHECK_INTEGRITY": "1", "TMPDIR": temporary, "PYTHONPATH": python_path()}
        self._process = ServerProcess(command, environment, folder / "server.log")
        self.url, self.log, self.ipc = self._process.url, self._process.log_path, self._process.ipc
        self.client = Client(self.url)

    async def wait_ready(self) -> None:
        await asyncio.to_thread(self._process.wait_ready, READY_S)

    async def close(self) -> list[str]:
        """Stop the server. Return what was wrong with its end: its status, and the files that it has left."""
        code = await asyncio.to_thread(self._process.stop)
        left = [str(p) for top in (*self.folders.values(), self.ipc) for p in top.rglob("*")]
        problems = [] if code == 0 else [f"the server ended with status {code}"]
        pids = self._process.processes()
        problems += [f"processes of the server are left: {pids}"] * bool(pids)
        self._process.close()
        return problems + [f"the server has left {left[:5]}"] * bool(left)

    def kill_all(self) -> None:
        self._process.close()

    # ------------------------------------------------------------------ processes

    def pids(self) -> list[tuple[str, int]]:
        """Return role and id of every process of the server."""
        return [(role, pid) for role, module in MODULES.items() for pid in self._process.pids(module)]

    def kill(self, role: str, number: int) -> None:
        """Kill the process ``number`` of a role, without a chance to clean up."""
        if pids := [pid for name, pid in self.pids() if name == role]:
            with suppress(ProcessLookupError):
                os.kill(pids[number % len(pids)], signal.SIGKILL)

    async def whole(self) -> None:
        """Return when all processes are there and an engine answers. Raises TimeoutError."""
        counts = {"engine": 1, "api": WORKERS, "supervisor": 1}

        async with asyncio.timeout(READY_S):
            while Counter(role for role, _ in self.pids()) != counts:
                await asyncio.sleep(0.05)
        await self.wait_ready()

    async def metrics(self) -> dict[str, float]:
        """Return all metrics, by their name. Raises as ``Client.get``."""
        return {name.removeprefix("fastdeploy:"): value for name, value in (await self.client.metrics()).items()}


def segments(pids: set[int]) -> list[Path]:
    """Return the shared memory segments that processes of these ids have made for weights."""
    found = Path("/dev/shm").glob("fastdeploy-weights-*")
    return [path for path in found if path.name.split("-")[2] in map(str, pids)]


class LineProcess:
    """A Python module in a process of its own, with ``arguments``. log: gets its stderr. threads: of the C++ ops."""

    def __init__(self, module: str, arguments: list[str], log: Path, threads: int | None = None):
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._environment = os.environ | {"PYTHONPATH": python_path()}
        if threads is not None:
            self._environment["FASTDEPLOY_CPU_THREADS"] = str(threads)
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=log, env=self._environment, limit=1 << 20
            )

    async def ask(self, line: str) -> AsyncIterator[Any]:
        """Send a line, and yield what the process says, until it ends. One that has just died gets nothing, without an
        error."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        with suppress(ConnectionError):
            stdin.write(line.encode() + b"\n")
            await stdin.drain()
        while said := await stdout.readline():
            if said.endswith(b"\n"):  # the last line of a killed process may be cut off
                yield json.loads(said)
        await self.process.wait()

    async def kill(self) -> None:
        """Kill the process, if it runs, and return when it is dead."""
        if self.runs:
            self.process.kill()
            await self.process.wait()

    async def close(self) -> None:
        """End the process by closing its stdin; kill it if it does not end in END_S."""
        if not self.runs:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        await self.kill()
