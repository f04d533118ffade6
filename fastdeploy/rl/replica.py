"""One server as the client knows it: calls to it, what it runs, and whether it may be used."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from fastdeploy.rl.errors import Unreachable
from fastdeploy.rl.wire import decode, error_of, events

BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
# These take the data key; every other route takes the control key, and is asked for at the control address.
DATA_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions/render", "/health", "/ready"})


class Replica:
    """One server. api_key, control_key: of its data and of its control routes (None: FASTDEPLOY_API_KEY and
    FASTDEPLOY_CONTROL_KEY of the environment; "": none). control_url: where the control routes are, if at a port of
    their own.

    in_flight: choices that this client has running here. boot_id: of the engine, as last seen. stale: it restarted
    with other weights than were published, or missed a commit: it is left out until a publication reaches it.
    retry_at: not to be used before, on the client's clock. doubtful: probe before use.
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
        self.doubtful = True
        self.probing = asyncio.Lock()

    def twin(self) -> Replica:
        """The same server over connections of its own, for another event loop. Close it with :meth:`close`."""
        http = httpx.AsyncClient(headers=self._http.headers, limits=httpx.Limits(), trust_env=False)
        keys = {"api_key": self._api_key, "control_key": self._control_key}
        return Replica(self.url, http, control_url=self.control_url, **keys)

    async def close(self) -> None:
        """Close the connections, which cancels what still runs."""
        await self._http.aclose()

    def _target(self, path: str) -> tuple[str, dict[str, str]]:
        """Address and authorization of a route. The control key opens the data routes too."""
        if path in DATA_ROUTES:
            url, key = self.url + path, self._api_key or self._control_key
        else:
            url, key = self.control_url + path, self._control_key or self._api_key
        return url, {"Authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, timeout_s: float = 30.0, **kwargs: Any) -> dict[str, Any]:
        """The result of a control route (``kwargs`` as httpx takes them). Raises Unreachable, or the server's error."""
        url, headers = self._target(path)
        headers |= kwargs.pop("headers", {})
        try:
            reply = await self._http.request(method, url, timeout=timeout_s, headers=headers, **kwargs)
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
        url, headers = self._target(path)
        try:
            async with self._http.stream("POST", url, json=body, timeout=timeout, headers=headers) as reply:
                if reply.status_code != 200:
                    raise error_of(reply.status_code, reply.headers, await reply.aread())
                yield events(reply.aiter_bytes())
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
