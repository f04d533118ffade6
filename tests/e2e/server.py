"""A real server in real processes, for tests that kill some of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.perturb import perturbed_copy
from fastdeploy.embedded import MODEL_DIR

PROMPT = list(range(40, 60))
SMALL = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "2048")


def perturbed(folder: Path) -> Path:
    """A copy of the embedded checkpoint in the new ``folder``, with other weights."""
    perturbed_copy(MODEL_DIR, folder, 0.1)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until ``condition`` is true and return its value. ``seconds`` is only a limit."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the live descendants of process ``pid``, without the process itself."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    frontier = {pid}
    while frontier:
        frontier = {p for p, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes):
        self.status = status
        self.headers = {k.lower(): v for k, v in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def result(self) -> Any:
        """Return the result of a native control envelope."""
        assert self.status == 200, (self.status, self.body)
        return self.json["result"]


class Server:
    """``fastdeploy serve`` with ``flags``, in a process group and with a socket folder of its own."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ipc_root = Path(tempfile.mkdtemp(prefix="fd-e2e-"))
        self.log_path = self.ipc_root.with_suffix(".log")
        self._log = self.log_path.open("wb")
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "FASTDEPLOY_IPC_ROOT": str(self.ipc_root),
                "FASTDEPLOY_CHECK_INTEGRITY": "1",
                **(env or {}),
            },
        )

    def wait_ready(self, seconds: float = 60.0) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                return self.get("/ready", timeout=5).status == 200
            except OSError:
                return False

        try:
            until(ready, seconds, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    # ---------------------------------------------------------------- processes

    def pids(self, of: str) -> list[int]:
        """Return the processes of this server whose command line contains ``of``."""
        return [p for p in descendants(self.process.pid) if of in _cmdline(p)]

    @property
    def engine_pid(self) -> int:
        return self.pids("fastdeploy.entrypoints.engine_main")[0]

    @property
    def api_pids(self) -> list[int]:
        return self.pids("entrypoints.api_server")

    def leftovers(self) -> list[str]:
        return [str(p) for p in self.ipc_root.iterdir()]

    def stop(self, how: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(seconds)
        self._log.close()
        return code

    def kill_everything(self) -> None:
        """Kill all processes that a test left."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    def remove(self) -> None:
        """Kill all processes that a test left, and delete the server's files."""
        self.kill_everything()
        shutil.rmtree(self.ipc_root, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)

    # ---------------------------------------------------------------- HTTP

    def request(self, method: str, path: str, body: Any = None, timeout: float = 90.0) -> Reply:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as r:
                return Reply(r.status, dict(r.headers), r.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, dict(error.headers), error.read())

    def get(self, path: str, timeout: float = 90.0) -> Reply:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, body: Any = None, timeout: float = 90.0) -> Reply:
        return self.request("POST", path, body, timeout)

    def finished(self, reason: str) -> int:
        """Return the number of sequences that ended for ``reason`` since the engine's start."""
        return int(self.metric(f'request_finished_total{{reason="{reason}"}}'))

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(f"fastdeploy:{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def weights(self, checksums: bool = False) -> Any:
        """What serves: ``version``, ``weight_epoch`` and, where asked for, ``checksum``."""
        return self.get(f"/v1/weights?checksums={str(checksums).lower()}").result

    def complete(self, prompt: Any, **params: Any) -> Any:
        """Make a completion that must succeed; return its first choice."""
        body = {"prompt": prompt, "return_token_ids": True, "temperature": 0, **params}
        reply = self.post("/v1/completions", body)
        assert reply.status == 200, (reply.status, reply.body)
        return reply.json["choices"][0]


class LiveStream(threading.Thread):
    """A streaming completion, read by a thread. ``tokens`` grows. ``ended`` is set at the end of the stream; ``error``
    is then an error event or a broken connection, or None."""

    def __init__(self, server: Server, prompt: list[int], **params: Any):
        super().__init__(daemon=True)
        self.server = server
        self.body = {
            "prompt": prompt,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
            "temperature": 0,
            "max_tokens": 3000,
            **params,
        }
        self.tokens: list[int] = []
        self.spans: list[dict[str, Any]] = []
        self.finals: list[str] = []
        self.error: Any = None
        self.done_seen = False
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for event in self._events():
                self._take(event)
        except Exception as error:
            self.error = self.error or error
        self.ended.set()

    def _events(self) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(
            self.server.url + "/v1/completions",
            data=json.dumps(self.body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as r:
            for line in r:
                if line.startswith(b"data: [DONE]"):
                    self.done_seen = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.spans += choice.get("weight_versions") or []
            if choice.get("finish_reason") is not None:
                self.finals.append(choice["finish_reason"])

    def wait_for_tokens(self, count: int = 1) -> LiveStream:
        until(lambda: len(self.tokens) >= count or self.ended.is_set(), 60, f"{count} tokens")
        assert len(self.tokens) >= count, (self.tokens, self.error)
        return self

    def wait_end(self, seconds: float = 60.0) -> LiveStream:
        assert self.ended.wait(seconds), f"the stream has no end after {seconds} s"
        return self


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
