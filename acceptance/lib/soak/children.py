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
    """A Python module in a process of its own. log: gets its stderr."""

    def __init__(self, module: str, arguments: list[str], log: Path, environment: dict[str, str] | None = None):
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = os.environ | (environment or {}) | {"PYTHONPATH": path}
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=log, env=self._environment, limit=1 << 20
            )

    async def ask(self, line: str) -> None:
        """Send a line. A process that has just died gets nothing, without an error."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    async def answers(self) -> AsyncIterator[Any]:
        """Yield what the process says, until it ends."""
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.endswith(b"\n"):  # the last line of a killed process may be cut off
                yield json.loads(line)
        await self._process.wait()

    async def answer(self) -> Any:
        """Return the next thing that the process says. Raises EOFError if it has ended."""
        async for said in self.answers():
            return said
        raise EOFError(f"{self._command[2]} has ended: see {self._log}")

    async def kill(self) -> None:
        """Kill the process, if it runs, and return when it is dead."""
        if self.runs:
            assert self._process is not None
            self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        """End the process by closing its stdin; kill it if it does not end in END_S."""
        if not self.runs:
            return
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
