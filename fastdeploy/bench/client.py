"""The client of the HTTP wire: JSON calls, and thousands of streams, whose bytes are timestamped and parsed later.

A general HTTP client would need the cores that the tested server needs: acceptance runs have 5,000 streams open.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from fastdeploy.bench.timeline import StreamLog

MAX_CONNECTING = 128  # connections that are opened at the same time


class WireError(Exception):
    """The server broke HTTP, or closed the connection in the middle of a response."""


class ServerError(Exception):
    """A call failed, or its answer breaks the contract."""


FAILURES = (ServerError, WireError, OSError, TimeoutError)  # of a server that cannot be driven


@dataclass(frozen=True)
class Reply:
    """A complete HTTP reply. body: the parsed JSON, or the text if it is not JSON."""

    status: int
    body: Any

    def checked(self, what: str) -> Any:
        """Return the body. Raises ServerError, which names ``what`` was called, if the status is not 200."""
        if self.status != 200:
            raise ServerError(f"{what}: HTTP {self.status}: {str(self.body)[:300]}")
        return self.body


class _HttpExchange(asyncio.Protocol):
    """One request and its response on a connection of its own. status: 0, and headers (names in lower case): empty,
    until the head is complete. pieces: of the body, each with the time of its arrival."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.error: str | None = None
        self.closed_at: float | None = None
        self.closed = asyncio.Event()
        self.arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._complete = self._ends_with_connection = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's declare no class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not an HTTP response: {error}")
            return
        if self._body:
            self.pieces.append((time.perf_counter(), bytes(self._body)))
            self._body.clear()
        self.arrived.set()
        if self._complete:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not (self._complete or (self._ends_with_connection and error is None)):
            why = error or "closed by the server in the middle of a response"
            self.error = self.error or f"connection lost: {why}"
        self._finish()

    def fail(self, message: str) -> None:
        self.error = self.error or message
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._finish()

    def _finish(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.perf_counter()
        self.closed.set()
        self.arrived.set()

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        framed = not self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        self._ends_with_connection = self.status >= 200 and not framed

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = self.status >= 200  # else another response follows


class EventReader:
    """Reader of a text/event-stream body. ``comments`` counts the comment lines."""

    def __init__(self) -> None:
        self.comments = 0
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the body; return the data of each event that they complete, in order."""
        self._buffer += data
        events: list[bytes] = []
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).rstrip(b"\r")
            del self._buffer[: end + 1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


class Stream:
    """A streamed completion. Reading ``log`` parses what has arrived so far."""

    def __init__(self, exchange: _HttpExchange, log: StreamLog) -> None:
        self._exchange = exchange
        self._events = EventReader()
        self._parsed = 0
        self._log = log

    @property
    def log(self) -> StreamLog:
        exchange, log = self._exchange, self._log
        log.status, log.headers, log.closed_at = exchange.status, exchange.headers, exchange.closed_at
        pieces, self._parsed = exchange.pieces[self._parsed :], len(exchange.pieces)
        for at, body in pieces:
            if log.status != 200:
                log.error = (log.error or "") + body.decode(errors="replace")
                continue
            for payload in self._events.feed(body):
                log.add_event(at, payload)
        log.comments = self._events.comments
        log.error = log.error or exchange.error
        return log

    async def wait_tokens(self, count: int) -> None:
        """Wait until ``count`` tokens have arrived, or the stream has ended."""
        while not self._exchange.closed.is_set() and self.log.num_tokens < count:
            self._exchange.arrived.clear()
            await self._exchange.arrived.wait()

    async def wait_closed(self) -> StreamLog:
        await self._exchange.closed.wait()
        return self.log

    def cancel(self) -> None:
        """Close the connection before the end of the stream."""
        self._exchange.fail("cancelled by the client")


class Client:
    """Client of one server. Each request has a connection of its own, so any API server may get it. headers: of every
    request, such as a key."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url: expected http://host[:port], got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._gate = asyncio.Semaphore(MAX_CONNECTING)

    async def call(self, method: str, path: str, body: Any = None, timeout: float = 120.0) -> Reply:
        """Send one request and return its complete reply. body: JSON. Raises WireError or OSError, and TimeoutError
        after ``timeout`` seconds."""
        async with asyncio.timeout(timeout):
            exchange = await self._send(method, path, body)
            try:
                await exchange.closed.wait()
            finally:
                exchange.close()
        if exchange.error:
            raise WireError(f"{method} {path}: {exchange.error}")
        raw = b"".join(piece for _, piece in exchange.pieces).decode()
        try:
            parsed = json.loads(raw)
        except ValueError:
            parsed = raw
        return Reply(exchange.status, parsed)

    async def get(self, path: str, timeout: float = 120.0) -> Any:
        """Return the body of a reply to GET; of our control routes, its result. Raises as ``call``, and ServerError."""
        return _result((await self.call("GET", path, timeout=timeout)).checked(path))

    async def post(self, path: str, body: Any = None, timeout: float = 600.0) -> Any:
        """The same for POST."""
        return _result((await self.call("POST", path, body, timeout)).checked(path))

    async def metrics(self) -> dict[str, float]:
        """Return each metric of /metrics, summed over its labels. Raises as ``get``."""
        values: dict[str, float] = {}
        for line in (await self.get("/metrics")).splitlines():
            if line and not line.startswith("#"):
                name, value = line.partition("{")[0].split(" ")[0], line.rpartition(" ")[2]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def upload(self, path: str, pieces: Sequence[bytes | memoryview], timeout: float = 600.0) -> tuple[int, Any]:
        """Send a body as octet-stream, and return the status and the parsed reply. Blocks, and copies nothing. Raises
        OSError or WireError."""
        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(sum(map(len, pieces)))}
        try:
            connection.request("POST", self._prefix + path, iter(pieces), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (HTTPException, ValueError) as error:
            raise WireError(f"POST {path}: {error}") from error
        finally:
            connection.close()

    async def stream(
        self, path: str, body: dict[str, Any], request_id: str = "", log: StreamLog | None = None
    ) -> Stream:
        """Send a streamed request; return when it is written, without waiting for an answer. Its
        ``sent_at`` is the time of this call. log: gets the events; None = a new StreamLog."""
        log = log or StreamLog(request_id, time.perf_counter())
        return Stream(await self._send("POST", path, body), log)

    async def _send(self, method: str, path: str, body: Any) -> _HttpExchange:
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            f"{self._headers}\r\n"
        )
        async with self._gate:
            loop = asyncio.get_running_loop()
            _, exchange = await loop.create_connection(
                lambda: _HttpExchange(head.encode() + payload), self._host, self._port
            )
        return exchange


def _result(body: Any) -> Any:
    """Return the result in the envelope of our control routes; another body as it is. Raises ServerError."""
    if not isinstance(body, dict) or "result" not in body:
        return body
    if body.get("status") != "success":
        raise ServerError(f"not a success envelope: {str(body)[:300]}")
    return body["result"]
