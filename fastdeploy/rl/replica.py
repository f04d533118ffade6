"""One server as the client knows it: calls to it, what it runs, and whether it may be used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec

from fastdeploy.errors import FastDeployError, from_wire
from fastdeploy.rl.errors import Unreachable

BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0


class Replica:
    """in_flight: choices that this client has running here. boot_id: of the engine, as last seen. stale: it restarted
    with other weights than were published, or missed a commit: it is left out until a publication reaches it.
    retry_at: not to be used before, on the client's clock. doubtful: probe before use.
    """

    def __init__(self, url: str, http: httpx.AsyncClient):
        self.url = url.rstrip("/")
        self._http = http
        self.in_flight = 0
        self.boot_id: str | None = None
        self.stale: str | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.doubtful = True
        self.probing = asyncio.Lock()

    async def call(self, method: str, path: str, timeout_s: float = 30.0, **kwargs: Any) -> dict[str, Any]:
        """The result of a control route (``kwargs`` as httpx takes them). Raises Unreachable, or the server's error."""
        try:
            reply = await self._http.request(method, self.url + path, timeout=timeout_s, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if reply.status_code != 200:
            raise error_of(reply.status_code, reply.headers, reply.content)
        body = decode(reply.content)
        return body.get("result", body)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any], silence_s: float) -> AsyncIterator[AsyncIterator[Any]]:
        """The events of a streaming generation: dicts, and None for each sign of life without one. Leaving it early
        cancels the request. Raises Unreachable when the connection breaks, or the server's error."""
        timeout = httpx.Timeout(silence_s, connect=min(silence_s, 10.0), pool=None)
        try:
            async with self._http.stream("POST", self.url + path, json=body, timeout=timeout) as reply:
                if reply.status_code != 200:
                    raise error_of(reply.status_code, reply.headers, await reply.aread())
                yield _events(reply)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"POST {path}: {type(error).__name__}: {error}") from error

    def failed(self, now: float, retry_after_s: float = 0.0) -> None:
        """Leave it alone for a while, longer each time; probe it before the next use."""
        self.failures += 1
        self.doubtful = True
        backoff = min(BACKOFF_S * 2 ** min(self.failures - 1, 30), MAX_BACKOFF_S)
        self.retry_at = now + max(retry_after_s, backoff * random.uniform(0.5, 1.0))

    def busy(self, now: float, retry_after_s: float) -> None:
        """It is well, but takes no requests just now."""
        self.retry_at = now + max(retry_after_s, BACKOFF_S)

    def well(self) -> None:
        self.failures, self.retry_at, self.doubtful = 0, 0.0, False


async def _events(reply: httpx.Response) -> AsyncIterator[Any]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = decode(line[6:].encode())
            if "error" in event:
                raise error_from(event)
            yield event
        elif line.startswith(":"):
            yield None


def decode(content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``; raises Unreachable for anything else (a proxy's page, half a line)."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict):
        raise Unreachable(f"expected a JSON object, got {content[:80]!r}")
    return body


def error_from(body: Mapping[str, Any], status: int = 500) -> FastDeployError:
    """The exception of an error body; its ``detail`` has "status"."""
    error = body.get("error")
    if not isinstance(error, dict):  # /ready has no more than a status
        message = str(body.get("status", f"status {status}"))
        error = {"message": message, "code": "rejecting_new_requests" if message.startswith("rejecting") else None}
    detail = {k: v for k, v in error.items() if k not in ("message", "code", "type")}
    return from_wire(str(error.get("code")), str(error.get("message")), detail | {"status": status})


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> FastDeployError:
    """The exception of an answer that is no 200; its ``detail`` has "status" and, where told, "retry_after"."""
    try:
        error = error_from(decode(content), status)
    except Unreachable as unreadable:
        if status < 500:
            return FastDeployError(f"status {status}: {unreadable.message}", status=status)
        error = Unreachable(f"status {status}: {unreadable.message}", status=status)
    with suppress(KeyError, ValueError):
        error.detail.setdefault("retry_after", float(headers["retry-after"]))
    return error
