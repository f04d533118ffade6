"""The server of a soak: its processes by role, its metrics, its folders, and killing one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from acceptance.lib.soak.children import ROOT
from benchmarks.lib.client import Client
from benchmarks.lib.processes import ServerProcess, command_words, send_all

MODULES = {
    "engine": "fastdeploy.entrypoints.engine_main",
    "api": "fastdeploy.entrypoints.api_server",
    "supervisor": "fastdeploy.entrypoints.cli",
}
WORKERS = 2
MAX_NUM_SEQS = 8  # fewer than rollouts in flight, so that some wait
KV_BLOCKS = 72  # fewer than eight long rollouts need, so that some are preempted
READY_S = 600.0


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
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"FASTDEPLOY_CHECK_INTEGRITY": "1", "TMPDIR": temporary, "PYTHONPATH": python_path}
        self._process = ServerProcess(command, folder, environment)
        self.url, self.log, self.ipc = self._process.url, self._process.log, self._process.ipc
        self.client = Client(self.url)

    async def wait_ready(self) -> None:
        await self._process.wait_ready(READY_S)

    async def close(self) -> list[str]:
        """Stop the server. Return what was wrong with its end: its status, and the files that it has left."""
        code, _ = await asyncio.to_thread(self._process.stop, 30.0)
        left = [str(p) for top in (*self.folders.values(), self.ipc) for p in top.rglob("*")]
        problems = [] if code == 0 else [f"the server ended with status {code}"]
        problems += [f"processes of the server are left: {self._process.left_over()}"] * bool(self._process.left_over())
        return problems + [f"the server has left {left[:5]}"] * bool(left)

    def kill_all(self) -> None:
        self._process.kill()

    # ------------------------------------------------------------------ processes

    def pids(self) -> list[tuple[str, int]]:
        """Return role and id of every process of the server."""
        words = [(pid, command_words(pid)) for pid in self._process.processes()]
        return [(role, pid) for pid, command in words for role, module in MODULES.items() if module in command]

    def kill(self, role: str, number: int) -> None:
        """Kill the process ``number`` of a role, without a chance to clean up."""
        if pids := [pid for name, pid in self.pids() if name == role]:
            send_all([pids[number % len(pids)]], signal.SIGKILL)

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
