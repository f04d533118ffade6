"""The processes that a soak talks to by lines of JSON: its trainer, and the reference."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
END_S = 20.0


class LineProcess:
    """A Python module in a process of its own, with ``arguments``. log: gets its stderr. threads: of the C++ ops."""

    def __init__(self, module: str, arguments: list[str], log: Path, threads: int | None = None):
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = os.environ | {"PYTHONPATH": path}
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
