#!/usr/bin/env python
"""Show the main features on the embedded model in about a minute: pause in every mode, update weights, stop.

    python acceptance/demo.py        (or: make demo)

Everything printed is measured over HTTP on the server that this script starts. Exits 1 if a promise fails.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from fastdeploy.testing import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from acceptance.lib.pause_report import show_checks, show_outcome
from acceptance.lib.progress import progress
from acceptance.lib.scenarios import Acceptance, Options, allow_files
from acceptance.lib.verdicts import Check, check_update
from benchmarks.lib.dialect import Native
from benchmarks.lib.report import Printer
from examples.embedded_model import arithmetic, tokenizer
from fastdeploy.bench.client import Client, Stream
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import completion
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import WEIGHTS, perturbed_copy

SOLVED = 64
RUNNING = 8
VERSION = "demo-2"
STEP_S = 0.0015  # of the C++ ops; slower ops get fewer tokens, so that the demo takes a minute or two
PERTURBATION = 0.02
READY_S, STOP_S = 120.0, 20.0
USUAL_S = 30.0  # of the demo
STARTED, SOLVED_ALL, PAUSED_ALL = 0.08, 0.12, 0.70  # share of the demo's time, at the end of each of its parts


class Demo:
    """The scenes of the demo, on one server. ``checks`` are the verdicts so far."""

    def __init__(self, server: ServerProcess, folder: Path, waiting: int, printer: Printer) -> None:
        self.server, self.folder, self.waiting, self.printer = server, folder, waiting, printer
        self.native = Native(Client(server.url))
        self.checks: list[Check] = []
        self.model = ""
        self.slower = 1.0  # measured step time over STEP_S
        self._began = time.monotonic()
        self._ends_at = self._began + USUAL_S  # as far as that is known
        self._problems = arithmetic.problems(seed=0, n=256)

    async def run(self) -> None:
        with progress(self._progress, self.printer.say):
            took = self.server.wait_ready(READY_S)
            self.model, length = await self.native.model(None)
            self.printer.say(f"{self.model} (context {length}) ready at {self.server.url} after {took:.1f} s")
            self._reached(STARTED)
            await self._solve()
            self._reached(SOLVED_ALL)
            await self._accept()
            self._reached(PAUSED_ALL)
            await self._update()

    def _reached(self, share: float) -> None:
        self._ends_at = self._began + (time.monotonic() - self._began) / share

    def _progress(self) -> str:
        now = time.monotonic()
        return f"demo: {now - self._began:.0f} s, about {max(self._ends_at - now, 1.0):.0f} s left"

    async def _solve(self) -> None:
        """Solve some problems, to show what the model does."""
        problems = self._problems[:SOLVED]
        prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in problems]
        bodies = [completion(self.model, prompt, 600) | {"ignore_eos": False} for prompt in prompts]
        streams = [await self.native.client.stream("/v1/completions", body, "solve") for body in bodies]
        rows, solved, steps = [], 0, []
        for problem, stream in zip(problems, streams, strict=True):
            log = await stream.wait_closed()
            right = arithmetic.is_correct(problem, log.text)
            solved += right
            if log.num_tokens > 30:
                steps.append((log.tokens[-1].at - log.tokens[0].at) / (log.num_tokens - 1))
            said = "".join(char if char.isprintable() else "." for char in log.text)
            said = said if len(said) < 60 else f"{said[:28]} ... {said[-28:]}"
            rows.append((problem.prompt, said, str(log.num_tokens), "right" if right else "wrong"))
        self.slower = max(median(steps) / STEP_S, 1.0)
        title = f"the model at work, greedy: {solved} of {len(rows)} held-out problems solved, among them"
        self.printer.table(title, ("problem", "answer", "tokens", ""), rows[:8])

    async def _accept(self) -> None:
        options = Options(self.model, running=RUNNING, max_tokens=3500, wait_tokens=self._scaled(800), freeze_s=1.5,
                          waiting=self.waiting)  # fmt: skip
        acceptance = Acceptance(self.native, options, self.printer.say, self._show, self._prompt)
        outcome = await acceptance.run()
        self.checks += outcome.checks
        show_outcome(self.printer, outcome)

    def _show(self, checks: list[Check]) -> None:
        show_checks(self.printer, checks)

    def _scaled(self, tokens: int) -> int:
        return max(int(tokens / self.slower), 96)

    def _prompt(self, index: int) -> list[int]:
        return tokenizer.prompt_ids(self._problems[index % len(self._problems)], chat=True)

    async def _update(self) -> None:
        """Make a bad update, then a good one whose folder is deleted at once, while streams run."""
        good, broken = self.folder / "step-2", self.folder / "broken"
        perturbed_copy(MODEL_DIR, good, PERTURBATION)
        break_weights(shutil.copytree(MODEL_DIR, broken))
        undisturbed = await self._streams("before")
        count = self._scaled(1500)
        live = [await self._open(i, count, "live") for i in range(RUNNING)]
        await asyncio.gather(*(stream.wait_tokens(count // 5) for stream in live))
        self.printer.say("update: a broken checkpoint")
        refused = await self._bad_update(broken)
        self.printer.say(f"update: new weights as {VERSION!r}")
        new = {"model_path": str(good), "version": VERSION}
        report = await self.native.client.post("/v1/update_weights", new)
        shutil.rmtree(good)
        self.printer.say(f"update: {report.get('status')}, timings in ms {report.get('timings_ms')}, folder deleted")
        after = await (await self._open(0, 32, "after")).wait_closed()
        logs = [await stream.wait_closed() for stream in live]
        checks = [refused, *check_update(logs, undisturbed, after, VERSION, count)]
        self.checks += checks
        self._show(checks)

    async def _bad_update(self, broken: Path) -> Check:
        body = {"model_path": str(broken), "version": "bad"}
        reply = await self.native.client.call("POST", "/v1/update_weights", body)
        error = reply.body.get("error") if isinstance(reply.body, dict) else None
        seen = f"HTTP {reply.status}: {str((error or {}).get('message', reply.body))[:60]}"
        return Check("update under live streams", "half a checkpoint is refused", seen, reply.status == 400)

    async def _streams(self, name: str) -> list[StreamLog]:
        streams = [await self._open(i, self._scaled(1500), name) for i in range(RUNNING)]
        return [await stream.wait_closed() for stream in streams]

    async def _open(self, index: int, tokens: int, name: str) -> Stream:
        request_id = f"{name}-{index}"
        body = completion(self.model, self._prompt(index), tokens, request_id)
        return await self.native.client.stream("/v1/completions", body, request_id)


def break_weights(folder: Path) -> None:
    """Cut the weights file in half, as if the trainer had died while writing it."""
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def check_stop(server: ServerProcess) -> list[Check]:
    """Stop the server by Ctrl-C; check its exit code and time, and that no process or socket file is left."""
    began = time.monotonic()
    code = server.stop(signal.SIGINT, STOP_S)
    took, left = time.monotonic() - began, server.processes()
    files = [str(path.relative_to(server.ipc)) for path in server.ipc.rglob("*")]
    promise = f"Ctrl-C ends the server within {STOP_S:.0f} s, exit code 0"
    return [
        Check("stop", promise, f"code {code}, {took:.2f} s", code == 0),
        Check("stop", "no process is left", ", ".join(map(str, left)) or "none", not left),
        Check("stop", "no socket file is left", ", ".join(files[:3]) or "none", not files),
    ]


def run(waiting: int, printer: Printer) -> int:
    """Return the exit code. Raises ServerError, WireError, OSError or TimeoutError if the server cannot be driven."""
    allow_files(2 * (waiting + RUNNING))
    with tempfile.TemporaryDirectory(prefix="fd-demo-") as name:
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", "--max-num-seqs", str(RUNNING)]
        with ServerProcess(command) as server:
            demo = Demo(server, Path(name), waiting, printer)
            asyncio.run(demo.run())
            stopped = check_stop(server)
            show_checks(printer, stopped)
    checks = demo.checks + stopped
    failed = [f"{check.scenario}: {check.promise}: {check.seen}" for check in checks if not check.ok]
    printer.say(f"{len(checks) - len(failed)} of {len(checks)} promises held")
    return printer.failed(failed, "FAILED")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=1000, help="length of the long queue (default: %(default)s)")
    args, printer = parser.parse_args(argv), Printer()
    try:
        return printer.exit_code(lambda: run(args.waiting, printer))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
