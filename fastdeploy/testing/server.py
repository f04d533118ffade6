"""``fastdeploy serve`` and ``fastdeploy fleet`` as processes that tests share, and reset in between."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fastdeploy.core.errors import InvalidField
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.models import find_model
from fastdeploy.testing.process import HOST, POLL_S, ServerFailed, ServerProcess

FASTDEPLOY = (sys.executable, "-m", "fastdeploy.entrypoints.cli")
READY_S = 60.0
CALL_S = 60.0  # limit of a call of a reset
OF_ADAPTER = "adapter:"  # in the scope of a hold, before the name
REPUBLISH = "republish"  # the hold of an engine that lacks a commit; a commit releases it


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
    """FastDeploy as a process. A ``with`` block begins when the server is ready, and ends with an orderly stop.

    model: folder of the weights that ``command`` loads, for :meth:`reset`. members: number of replicas of a fleet,
    which is ready when all of them are members. key: that the calls of this class show, for a server with keys.
    ready_s: limit of the start. Other arguments, and the attributes: see ServerProcess."""

    def __init__(
        self,
        command: Sequence[str],
        model: Path = MODEL_DIR,
        *,
        members: int = 0,
        key: str | None = None,
        ready_s: float = READY_S,
        environment: Mapping[str, str] | None = None,
        log: str | Path | None = None,
    ):
        self._model = model.resolve()
        self._num_members = members
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._ready_s = ready_s
        self._base: BaseWeights | None = None
        self._connection: http.client.HTTPConnection | None = None
        super().__init__(command, environment, log)

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def wait_ready(self, timeout_s: float | None = None, path: str = "/ready") -> float:
        """See ServerProcess.wait_ready. timeout_s: None = ready_s."""
        start, timeout_s = time.perf_counter(), self._ready_s if timeout_s is None else timeout_s
        super().wait_ready(timeout_s, path)
        while self._num_members and self._members() < self._num_members:
            if time.perf_counter() - start > timeout_s:
                raise ServerFailed(f"after {timeout_s:g} s not all replicas are members; {self.log_end()}")
            time.sleep(POLL_S)
        if self._base is None:
            status, body = self.call("GET", "/v1/weights")
            self._base = BaseWeights.of(body["result"]) if status == 200 else None
        return time.perf_counter() - start

    def _members(self) -> int:
        status, body = self.call("GET", "/v1/replicas")
        return sum(entry["state"] == "member" for entry in body["replicas"]) if status == 200 else 0

    # ------------------------------------------------------------------ reset

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
        if base is None:
            raise ServerFailed("reset: /v1/weights could not be read when the server became ready: does it need a key?")
        if any(word.partition("=")[0] == "--faults" for word in self.command):
            self._control("DELETE", "/v1/faults")
        serves = self._control("GET", "/v1/weights")
        if serves["asleep"]:
            self._control("POST", "/v1/wakeup")
        self._control("POST", "/v1/reset")
        # An update, also where a new label would do: only then does an engine that dies come back without a hold.
        paused = self._control("GET", "/v1/is_paused")
        holds = [hold for scope in (paused, *paused["scopes"]) for hold in scope["holds"]]
        is_lost = any(hold["id"] == REPUBLISH for hold in holds)
        if BaseWeights.of(serves) != base or base.fingerprint is None or is_lost:
            self._control("POST", "/v1/update_weights", {"model_path": str(self._model), "version": base.version})
        for hold in [hold for hold in holds if hold["id"] != REPUBLISH]:
            _, _, adapter = hold["scope"].partition(OF_ADAPTER)
            self._control("POST", "/v1/resume", {"hold_id": hold["id"], "lora_name": adapter or None})

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
        for attempt in ("kept", "new"):
            connection = self._connection or http.client.HTTPConnection(HOST, self.port, timeout=CALL_S)
            self._connection = None
            try:
                connection.request(method, path, text, self._headers)
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


def serve(
    model: str | Path | None = None,
    *flags: str,
    replicas: int = 0,
    environment: Mapping[str, str] | None = None,
    ready_s: float = READY_S,
    log: str | Path | None = None,
) -> Server:
    """Start ``fastdeploy serve`` with these flags, or ``fastdeploy fleet`` with this many replicas. Return the server
    for a ``with`` block, which raises ServerFailed if the server is not ready after ``ready_s``.

    model: a folder, or a name of MODELS; None = the embedded model. Other arguments: see ServerProcess. Raises
    InvalidField if the model is neither, or if ``flags`` name a model: a reset would not know it."""
    if any(flag.partition("=")[0] == "--model" for flag in flags):
        raise InvalidField("flags", "expected no --model: the first argument names the model")
    folder, name = find_model(model)
    program = ["fleet", "--replicas", str(replicas)] if replicas else ["serve"]
    named = [] if model is None else ["--model", str(folder), "--served-model-name", name]
    command = [*FASTDEPLOY, *program, *named, *flags]
    return Server(command, folder, members=replicas, ready_s=ready_s, environment=environment, log=log)
