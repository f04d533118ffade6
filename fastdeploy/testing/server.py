"""``fastdeploy serve`` and ``fastdeploy fleet`` as processes that tests share, and reset in between."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.process import HOST, POLL_S, ServerFailed, ServerProcess

PROGRAM = (sys.executable, "-m", "fastdeploy.entrypoints.cli")
READY_S = 60.0
CALL_S = 60.0  # limit of a call of a reset


class BaseWeights(NamedTuple):
    """The weights of the start: what :meth:`Server.reset` brings back."""

    version: Any
    fingerprint: str | None
    eos_token_ids: list[int]

    @classmethod
    def of(cls, weights: dict[str, Any]) -> BaseWeights:
        """Return the weights that a reply of /v1/weights describes."""
        return cls(**{name: weights[name] for name in cls._fields})


class Server(ServerProcess):
    """``fastdeploy serve``, or ``fastdeploy fleet`` with ``replicas``. model: a folder, or None for the embedded model.
    environment, log, and the attributes: see ServerProcess."""

    def __init__(
        self,
        model: str | Path | None = None,
        *flags: str,
        replicas: int | None = None,
        environment: Mapping[str, str] | None = None,
        log: str | Path | None = None,
    ):
        if "--port" in flags or str(model).startswith("-"):
            raise ValueError(f"expected a model or None, and then flags other than --port, got {(model, *flags)}")
        self._model = Path(MODEL_DIR if model is None else model).resolve()
        self._num_members = replicas
        self._base: BaseWeights | None = None
        self._connection: http.client.HTTPConnection | None = None
        command = ["serve"] if replicas is None else ["fleet", "--replicas", str(replicas)]
        command += [] if model is None else ["--model", str(self._model)]
        super().__init__([*PROGRAM, *command, *flags], environment, log)

    def wait_ready(self, timeout_s: float = READY_S, path: str = "/ready") -> float:
        """See ServerProcess.wait_ready. A fleet is ready when all of its replicas are members."""
        start = time.perf_counter()
        super().wait_ready(timeout_s, path)
        while self._num_members is not None and self._members() < self._num_members:
            if time.perf_counter() - start > timeout_s:
                raise ServerFailed(f"after {timeout_s:g} s not all replicas are members; {self.log_end()}")
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def _members(self) -> int:
        status, body = self.call("GET", "/v1/replicas")
        return sum(entry["state"] == "member" for entry in body["replicas"]) if status == 200 else 0

    # ------------------------------------------------------------------ reset

    def remember_base(self) -> None:
        """Note which weights serve, for :meth:`reset`."""
        self._base = BaseWeights.of(self._control("GET", "/v1/weights"))

    def reset(self) -> None:
        """Bring the server into the state of its start: no requests, no holds, no adapters, no cached prefixes, awake,
        no faults, and the base weights under their first label. Counters in /metrics and the weight epoch grow on.

        If the engine or an API server has died, wait for the next one. Raises ServerFailed, which says why the server
        is not clean."""
        try:
            self._reset()
        except (OSError, http.client.HTTPException, ServerFailed):
            self.wait_ready()
            try:
                self._reset()
            except (OSError, http.client.HTTPException) as error:
                raise ServerFailed(f"reset: {error!r}; {self.log_end()}") from error

    def _reset(self) -> None:
        base = self._base
        assert base is not None, "remember_base was called when the server was ready"
        if "--faults" in self.command:
            self._control("DELETE", "/v1/faults")
        serves = self._control("GET", "/v1/weights")
        if serves["asleep"]:
            self._control("POST", "/v1/wakeup")
        self._control("POST", "/v1/reset", {"version": base.version})
        if BaseWeights.of(serves)[1:] != base[1:] or base.fingerprint is None:
            self._control("POST", "/v1/update_weights", {"model_path": str(self._model), "version": base.version})
        for hold in self._control("GET", "/v1/is_paused")["holds"]:
            self._control("POST", "/v1/resume", {"hold_id": hold["id"]})

    def _control(self, method: str, path: str, body: Any = None) -> Any:
        """Return the result of a control call. Raises ServerFailed if it fails."""
        self.require_running()
        status, reply = self.call(method, path, body)
        if status != 200:
            raise ServerFailed(f"{method} {path}: HTTP {status}: {str(reply)[:300]}")
        return reply.get("result", reply)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Make a call with a body of JSON, on a connection that is kept. Return status and parsed body. Made again once
        if the server has closed the connection, so only for calls that may be repeated. Raises OSError or
        HTTPException."""
        text = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        for attempt in ("kept", "new"):
            connection = self._connection or http.client.HTTPConnection(HOST, self.port, timeout=CALL_S)
            self._connection = None
            try:
                connection.request(method, path, text, headers)
                response = connection.getresponse()
                found = response.status, json.loads(response.read() or "null")
                self._connection = connection
                return found
            except (ConnectionError, http.client.HTTPException):
                connection.close()
                if attempt == "new":
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """See ServerProcess.close."""
        if self._connection is not None:
            self._connection.close()
        super().close()


@contextlib.contextmanager
def serve(
    model: str | Path | None = None,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    ready_s: float = READY_S,
    log: str | Path | None = None,
) -> Iterator[Server]:
    """Run ``fastdeploy serve`` with these flags while the block runs. Raises ServerFailed if it is not ready after
    ``ready_s``. Other arguments: see Server."""
    with _running(Server(model, *flags, environment=environment, log=log), ready_s) as server:
        yield server


@contextlib.contextmanager
def serve_fleet(
    model: str | Path | None = None,
    *flags: str,
    replicas: int = 2,
    environment: Mapping[str, str] | None = None,
    ready_s: float = READY_S,
    log: str | Path | None = None,
) -> Iterator[Server]:
    """Run ``fastdeploy fleet`` with ``replicas`` while the block runs. See serve."""
    with _running(Server(model, *flags, replicas=replicas, environment=environment, log=log), ready_s) as fleet:
        yield fleet


@contextlib.contextmanager
def _running(server: Server, ready_s: float) -> Iterator[Server]:
    try:
        server.wait_ready(ready_s)
        server.remember_base()
        yield server
        server.stop()
    finally:
        server.close()
