"""A real server in real processes, which a test may kill."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx

from fastdeploy import testing
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import WEIGHTS, entries, head, perturbed_copy

PROMPT = list(range(40, 60))
LONG = 3900  # tokens of a request that runs for seconds, until a test has disturbed it and aborts it
SMALL = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "2048")


def perturbed(folder: Path) -> Path:
    """Make a copy of the embedded checkpoint in the new ``folder``, with other weights."""
    perturbed_copy(MODEL_DIR, folder, 0.1)
    return folder


def halves(folder: Path) -> list[bytes]:
    """Return the checkpoint in ``folder`` as two safetensors files, each with half of the tensors."""
    raw = (folder / WEIGHTS).read_bytes()
    found = list(entries(raw))
    return [
        b"".join(
            [head((e.name, e.dtype, e.shape, e.end - e.start) for e in half), *(raw[e.start : e.end] for e in half)]
        )
        for half in (found[::2], found[1::2])
    ]


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until ``condition`` is true and return its value. ``seconds`` is only a limit."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


def in_background(call: Callable[..., Any], *args: Any, **fields: Any) -> Future[Any]:
    """Make the call in a thread of its own. ``result(60)`` waits for its result, or raises its error."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **fields))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def shared_memory(pids: list[int]) -> set[str]:
    """Return the files in /dev/shm that the processes have mapped. Other tests have files there, too."""
    mapped = [line.split(maxsplit=5)[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {path for path in mapped if path.startswith("/dev/shm/")}


class Reply:
    def __init__(self, response: httpx.Response):
        self.status, self.headers, self.body = response.status_code, response.headers, response.content

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def ok(self) -> Any:
        """Return the body of a call that must succeed."""
        assert self.status == 200 and "content-length" in self.headers, (self.status, self.body)
        return self.json

    @property
    def result(self) -> Any:
        """Return the result of a native control call that must succeed."""
        return self.ok()["result"]


class Server(testing.Server):
    """``fastdeploy serve`` with ``flags``, which checks its own integrity. settings: of fastdeploy.testing.Server."""

    words: tuple[str, ...] = ("fastdeploy.entrypoints.cli", "serve")
    before: tuple[str, ...] = ()  # words of a command that runs the server

    def __init__(self, *flags: str, **settings: Any):
        command = [*self.before, sys.executable, "-m", *self.words, *flags]
        super().__init__(command, environment={"FASTDEPLOY_CHECK_INTEGRITY": "1"}, **settings)
        # Each call has a connection of its own, so that any API server may get it.
        self.http = httpx.Client(base_url=self.url, timeout=90, limits=httpx.Limits(max_keepalive_connections=0))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()
        super().close()

    @property
    def engine_pid(self) -> int:
        return self.pids("fastdeploy.entrypoints.engine_main")[0]

    @property
    def api_pids(self) -> list[int]:
        return self.pids("entrypoints.api_server")

    def leftovers(self) -> list[str]:
        return [str(p) for p in self.ipc.iterdir()]

    # ---------------------------------------------------------------- HTTP

    def request(self, method: str, path: str, body: Any = None, timeout: float = 90.0) -> Reply:
        """Make a call. body: bytes are an upload; anything else is sent as JSON."""
        upload = {"content": body, "headers": {"Content-Type": "application/octet-stream"}}
        how = upload if isinstance(body, bytes) else {"json": body}
        return Reply(self.http.request(method, path, timeout=timeout, **how))

    def get(self, path: str, timeout: float = 90.0) -> Reply:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, body: Any = None, timeout: float = 90.0) -> Reply:
        return self.request("POST", path, body, timeout)

    def finished(self, reason: str) -> int:
        """Return the number of sequences that ended for ``reason`` since the engine's start."""
        return int(self.metric(f'request_finished_total{{reason="{reason}"}}'))

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").body.decode().split("\n"):
            if line.startswith(f"fastdeploy:{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def weights(self, checksums: bool = False) -> Any:
        """Return the state of the weights: ``version``, ``weight_epoch``, and ``checksum`` if asked for."""
        return self.get(f"/v1/weights?checksums={str(checksums).lower()}").result

    def complete(self, prompt: Any, **params: Any) -> Any:
        """Make a completion that must succeed; return its first choice."""
        body = {"prompt": prompt, "return_token_ids": True, "temperature": 0, **params}
        return self.post("/v1/completions", body).ok()["choices"][0]


class LiveStream(threading.Thread):
    """A streaming completion, read by a thread. ``tokens`` grows. ``ended`` is set at the end of the stream; ``error``
    is then an error event or a broken connection, or None."""

    def __init__(self, server: Server, prompt: list[int], **params: Any):
        super().__init__(daemon=True)
        self.server = server
        always = {"prompt": prompt, "stream": True, "return_token_ids": True}
        self.body = {**always, "ignore_eos": True, "temperature": 0, "max_tokens": 3000, **params}
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
        with self.server.http.stream("POST", "/v1/completions", json=self.body, timeout=120) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: [DONE]"):
                    self.done_seen = True
                elif line.startswith("data: "):
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

    def abort(self) -> LiveStream:
        """Abort all requests of the server, and wait for the end of this stream."""
        self.server.post("/v1/abort_requests", {"abort_all": True}).ok()
        self.wait_end()
        assert self.finals == ["abort"], (self.finals, self.error)
        return self

    def wait_end(self, seconds: float = 60.0) -> LiveStream:
        assert self.ended.wait(seconds), f"the stream has no end after {seconds} s"
        return self
