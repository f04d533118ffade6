"""HTTP with one address, which is a server or the gateway of a fleet: calls, streams, and the parsing of replies."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from fastdeploy.core.early_reply import EarlyReply
from fastdeploy.core.errors import FastDeployError, InvalidField, from_wire
from fastdeploy.rl.errors import MalformedReply, Unreachable

RETRY_S, MAX_RETRY_S = 0.1, 2.0
SLICE_BYTES = 1 << 20  # of an upload, sent at once: asyncio moves the rest of a longer buffer after each send
MAX_LINE_BYTES = 256 << 20  # prompt_logprobs of a long prompt are one line
MAX_RETRY_AFTER_S = 60.0
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
SESSIONS = "/v1/sessions/"
# These routes and those of sessions take the API key. Every other route takes the control key, and is at the control
# address.
DATA_ROUTES = frozenset(
    {"/v1/completions", "/v1/chat/completions/render", "/v1/models", "/generate", "/health", "/ready"}
)
T = TypeVar("T")


class Connection:
    """One address. api_key, control_key: keys of the data and control routes (None: FASTDEPLOY_API_KEY and
    FASTDEPLOY_CONTROL_KEY of the environment; "": no key). control_url: address of the control routes, if they have a
    port of their own. is_local: the server is on this host. http: sends all but the large uploads."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        control_key: str | None = None,
        control_url: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.url = one_address("url", url)
        self.control_url = one_address("control_url", control_url or url)
        self.is_local = urlsplit(self.url).hostname in LOOPBACK_HOSTS
        self.http = http_client(headers)
        self._api_key = os.environ.get("FASTDEPLOY_API_KEY", "") if api_key is None else api_key
        self._control_key = os.environ.get("FASTDEPLOY_CONTROL_KEY", "") if control_key is None else control_key

    def copy(self) -> Connection:
        """Return a connection to the same address for another event loop."""
        keys = {"api_key": self._api_key, "control_key": self._control_key}
        return Connection(self.url, control_url=self.control_url, headers=self.http.headers, **keys)

    async def close(self) -> None:
        """Close the connection, which cancels running calls."""
        await self.http.aclose()

    @property
    def data_key(self) -> str:
        """The key for data routes; "" = none."""
        return self._api_key or self._control_key

    def target(self, path: str) -> tuple[str, dict[str, str]]:
        """Return the address and the authorization header of a route. The control key opens the data routes too."""
        if path in DATA_ROUTES or path.startswith(SESSIONS):
            url, key = self.url + path, self.data_key
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
        body, or that in ``kwargs``. Raises Unreachable, also after ``timeout_s``, or the server's error."""
        url, headers = self.target(path)
        send = self.http.request if upload is None else self._upload
        if upload is not None:
            headers["Content-Type"] = "application/octet-stream"
            headers["Content-Length"] = str(sum(memoryview(piece).nbytes for piece in upload))
            kwargs["upload"] = upload
        try:
            async with asyncio.timeout(timeout_s):
                reply = await send(method, url, timeout=timeout_s, headers=headers, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise Unreachable(f"{method} {path}: no answer within {timeout_s} s") from error
        if reply.status_code != 200:
            raise reply_error(reply.status_code, reply.headers, reply.content)
        body = decode_object(reply.content)
        return body.get("result", body)

    async def _upload(
        self, method: str, url: str, upload: Sequence[bytes | memoryview], **kwargs: Any
    ) -> httpx.Response:
        """Send a request with a large body on a connection of its own. Stops sending when the server has answered."""
        early = EarlyReply()
        async with http_client(self.http.headers) as http:
            content = early.body(_slices(upload))
            return await http.request(method, url, content=content, extensions=early.extensions, **kwargs)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any], silence_s: float) -> AsyncIterator[AsyncIterator[Any]]:
        """Stream the events of a generation: a dict for each event, None for each SSE comment (sent to keep the
        connection alive). Leaving the block early cancels the request. Raises Unreachable if the connection breaks, or
        the server's error."""
        timeout = httpx.Timeout(silence_s, connect=min(silence_s, 10.0), pool=None)
        url, headers = self.target(path)
        try:
            async with self.http.stream("POST", url, json=body, timeout=timeout, headers=headers) as reply:
                if reply.status_code != 200:
                    raise reply_error(reply.status_code, reply.headers, await reply.aread())
                yield read_events(reply.aiter_bytes())
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"POST {path}: {type(error).__name__}: {error}") from error


def one_address(field: str, url: Any) -> str:
    """Return an address without a slash at its end. Raises InvalidField for anything but one address."""
    if not isinstance(url, str):
        several = "`fastdeploy fleet MODEL --replica tcp://HOST:PORT=URL ...` makes one address of several servers"
        raise InvalidField(field, f"expected one address as a string, got {url!r}: {several} (see docs/run-a-fleet.md)")
    return url.rstrip("/")


def http_client(headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client that has no limit of connections and ignores the proxies of the environment."""
    return httpx.AsyncClient(headers=headers, limits=httpx.Limits(), trust_env=False, verify=_tls_context())


@cache
def _tls_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # reads all certificates, which takes 20 ms


async def _slices(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[memoryview]:
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            yield rest[:SLICE_BYTES]
            rest = rest[SLICE_BYTES:]


async def repeat(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Return the result of a call that may be made many times. It is made again while the server cannot be reached or
    has no live engine. Raises the last error after ``timeout_s``."""
    last: FastDeployError = Unreachable(f"no answer within {timeout_s} s")
    wait = RETRY_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await call()
                except FastDeployError as error:
                    if not isinstance(error, Unreachable) and error.code != "engine_dead":
                        raise
                    last = error
                await asyncio.sleep(wait)
                wait = min(2 * wait, MAX_RETRY_S)
    except TimeoutError:
        raise last from None


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class LineReader:
    """A reader that splits bytes into lines. Only "\\n" ends a line: JSON may contain U+2028, U+2029 and U+0085."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES):
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their ends. Raises MalformedReply for a line longer than
        ``max_bytes``."""
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if max([self._size, *map(len, ended)]) > self._max_bytes:
            raise MalformedReply(f"a line of the stream has more than {self._max_bytes} bytes")
        return [line.removesuffix(b"\r") for line in ended]


async def read_events(content: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of a text/event-stream, and None for each comment line. Raises the error in an event."""
    lines = LineReader()
    async for data in content:
        for line in lines.feed(data):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event = decode_object(line[6:])
                if "error" in event:
                    raise body_error(event)
                yield event
            elif line.startswith(b":"):
                yield None


def decode_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in ``content``. Raises Unreachable for anything else, as the page of a proxy."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict):
        raise Unreachable(f"expected a JSON object, got {content[:80]!r}")
    return body


def body_error(body: Mapping[str, Any], status: int = 500) -> FastDeployError:
    """Return the exception of an error body. Its ``detail`` has "status", and "retry_after" (seconds) if the body has
    it."""
    error = body.get("error")
    if not isinstance(error, dict):  # the body of /health and /ready has only a status
        message = str(body.get("status", f"status {status}"))
        unavailable = "rejecting_new_requests" if message.startswith("rejecting") else "engine_dead"
        error = {"message": message, "code": unavailable if status == 503 else None}
    detail = {k: v for k, v in error.items() if k not in ("message", "code", "type", "retry_after")}
    if (wait := _seconds(error.get("retry_after"))) is not None:
        detail["retry_after"] = wait
    return from_wire(str(error.get("code")), str(error.get("message")), detail | {"status": status})


def reply_error(status: int, headers: Mapping[str, str], content: bytes) -> FastDeployError:
    """Return the exception of a reply whose status is not 200. See :func:`body_error`."""
    try:
        error = body_error(decode_object(content), status)
    except Unreachable as unreadable:
        kind = FastDeployError if status < 500 else Unreachable
        error = kind(f"status {status}: {unreadable.message}", status=status)
    if (wait := _seconds(headers.get("retry-after"))) is not None:
        error.detail.setdefault("retry_after", wait)
    return error


def _seconds(value: Any) -> float | None:
    """Return a Retry-After wait, at most MAX_RETRY_AFTER_S; None if ``value`` is no number of seconds (a date)."""
    try:
        wait = float(value)
    except (TypeError, ValueError):
        return None
    return min(max(wait, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(wait) else None
