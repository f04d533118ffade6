"""Calls of a stack (support.http_stack): what its scripted engine answers, and how replies are read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
from fastapi import FastAPI

from fastdeploy.http.guards.route_access import AccessPolicy, RouteTable
from fastdeploy.inter_communicator import messages as m

OCTETS = {"content-type": "application/octet-stream"}


def in_thread(call: Callable, *args: Any, **kwargs: Any) -> Future:
    """Run a blocking call in a thread."""
    return ThreadPoolExecutor(1).submit(call, *args, **kwargs)


def route_table(app: FastAPI) -> RouteTable:
    """Return the table that the guard of an app reads."""
    checks = [guard.kwargs["check"] for guard in app.user_middleware if "check" in guard.kwargs]
    return next(check.__self__.routes for check in checks if isinstance(check.__self__, AccessPolicy))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(stack: Any, kind: type, result: dict | None = None, failure: m.Failure | None = None) -> None:
    """Let the engine answer every call of ``kind`` with this result or failure."""
    stack.engine.replies[kind] = lambda call: m.Reply(call.call_id, result or {}, failure)


def events(response: httpx.Response) -> list:
    """Return the events of a stream, decoded."""
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def exchange(stack: Any, request: bytes) -> tuple[bytes, dict]:
    """Send bytes on a new connection, and return the head and the JSON of the reply when the server has closed it."""
    with socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20) as connection:
        connection.sendall(request)
        head, body = b"".join(iter(lambda: connection.recv(4096), b"")).split(b"\r\n\r\n", 1)
    return head, json.loads(body)


def refused(response: httpx.Response, field: str, *words: str) -> None:
    """Assert a 400 whose message names ``field`` and has these words."""
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(field) and all(word in message for word in words), message
