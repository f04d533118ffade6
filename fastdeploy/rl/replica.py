"""One server as the client sees it: its routes, its load, and whether it may be used."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx

from fastdeploy.core.early_reply import EarlyReply
from fastdeploy.rl.errors import Unreachable
from fastdeploy.rl.replies import decode_object, read_events, reply_error

BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
SLICE_BYTES = 1 << 20  # of an upload, sent at once: asyncio moves the rest of a longer buffer after each send
# These routes take the API key. Every other route takes the control key, and is at the control address.
DATA_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions/render", "/health", "/ready"})


def http_client(headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client that has no limit of connections and ignores the proxies of the environment."""
    return httpx.AsyncClient(headers=headers, limits=httpx.Limits(), trust_env=False, verify=_tls_context())


@cache
def _tls_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # reads all certificates, which takes 20 ms


class Replica:
    """One server. api_key, control_key: keys of the data and control routes (None: FASTDEPLOY_API_KEY and
    FASTDEPLOY_CONTROL_KEY of the environment; "": no key). control_url: address of the control routes, if they have a
    port of their own.

    in_flight: choices of this client that run here. boot_id: last known boot id of the engine. stale: why the replica
    gets no requests until it is published to (a restart without the published weights, or a failed commit), or None.
    retry_at: earliest time of the next use, on the event loop's clock. needs_probe: ask /health and /ready before use.
    """

    def __init__(
        self,
        url: str,
        http: httpx.AsyncClient,
        *,
        api_key: str | None = None,
        control_key: str | None = None,
        control_url: str | None = None,
    ):
        self.url = url.rstrip("/")
        self.control_url = (control_url or url).rstrip("/")
        self._http = http
        self._api_key = os.environ.get("FASTDEPLOY_API_KEY", "") if api_key is None else api_key
        self._control_key = os.environ.get("FASTDEPLOY_CONTROL_KEY", "") if control_key is None else control_key
        self.in_flight = 0
        self.boot_id: str | None = None
        self.stale: str | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.needs_probe = True
        self.probe_lock = asyncio.Lock()

    def with_own_connections(self) -> Replica:
        """Return a replica of the same server with connections of its own, for another event loop. The caller closes
        it with :meth:`close`."""
        keys = {"api_key": self._api_key, "control_key": self._control_key}
        return Replica(self.url, http_client(self._http.headers), control_url=self.control_url, **keys)

    async def close(self) -> None:
        """Close the connections, which cancels running calls."""
        await self._http.aclose()

    def _target(self, path: str) -> tuple[str, dict[str, str]]:
        """Return the address and the authorization header of a route. The control key opens the data routes too."""
        if path in DATA_ROUTES:
            url, key = self.url + path, self._api_key or self._control_key
        else:
            url, key = self.control_url + path, self._control_key or self._api_key
        return url, {"Authorization": f"Bearer {key}"} if key else {}

    async def call(
        self,
        method: str,
        path: str,
        timeout_s: float = 30.0,
        upload: Sequence[bytes | memoryview] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the result of a route (``kwargs`` of httpx). upload: pieces of the body, which are tensors; None: no
        body, or that in ``kwargs``. Raises Unreachable, or the server's error."""
        url, headers = self._target(path)
        if upload is not None:
            headers["Content-Type"] = "application/octet-stream"
            headers["Content-Length"] = str(sum(memoryview(piece).nbytes for piece in upload))
        kwargs |= {"timeout": timeout_s, "headers": headers}
        try:
            if upload is None:
                reply = await self._http.request(method, url, **kwargs)
            else:
                reply = await self._upload(method, url, upload, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if reply.status_code != 200:
            raise reply_error(reply.status_code, reply.headers, reply.content)
        body = decode_object(reply.content)
        return body.get("result", body)

    async def _upload(
        self, method: str, url: str, upload: Sequence[bytes | memoryview], **kwargs: Any
    ) -> httpx.Response:
        """Send a request with a large body on a connection of its own. Stops sending when the server has answered."""
        early = EarlyReply()
        async with http_client(self._http.headers) as http:
            content = early.body(_slices(upload))
            return await http.request(method, url, content=content, extensions=early.extensions, **kwargs)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any], silence_s: float) -> AsyncIterator[AsyncIterator[Any]]:
        """Stream the events of a generation: a dict for each event, None for each SSE comment (sent to keep the
        connection alive). Leaving the block early cancels the request. Raises Unreachable if the connection breaks, or
        the server's error."""
        timeout = httpx.Timeout(silence_s, connect=min(silence_s, 10.0), pool=None)
        url, headers = self._target(path)
        try:
            async with self._http.stream("POST", url, json=body, timeout=timeout, headers=headers) as reply:
                if reply.status_code != 200:
                    raise reply_error(reply.status_code, reply.headers, await reply.aread())
                yield read_events(reply.aiter_bytes())
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"POST {path}: {type(error).__name__}: {error}") from error

    def mark_failed(self, now: float, retry_after_s: float = 0.0) -> None:
        """Do not use the replica for a while, longer after each failure, and probe it before the next use."""
        self.failures += 1
        self.needs_probe = True
        backoff = min(BACKOFF_S * 2 ** min(self.failures - 1, 30), MAX_BACKOFF_S)
        self.retry_at = now + max(retry_after_s, backoff * random.uniform(0.5, 1.0))

    def mark_busy(self, now: float, retry_after_s: float) -> None:
        """Do not use the replica for a while: it works, but takes no requests at the moment."""
        self.retry_at = now + max(retry_after_s, BACKOFF_S)

    def mark_healthy(self) -> None:
        self.failures, self.retry_at, self.needs_probe = 0, 0.0, False


async def _slices(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[memoryview]:
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            yield rest[:SLICE_BYTES]
            rest = rest[SLICE_BYTES:]
