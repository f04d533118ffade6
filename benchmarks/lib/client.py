"""A fast asyncio HTTP client: JSON calls, and thousands of streams, whose bytes are timestamped and parsed later."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from benchmarks.lib.http_reader import EventReader, ResponseReader, WireError
from benchmarks.lib.timeline import StreamLog

MAX_CONNECTING = 128  # connections that are opened at the same time


@dataclass(frozen=True)
class Reply:
    """A complete HTTP reply. body: the parsed JSON, or the text if it is not JSON."""

    status: int
    body: Any


class _HttpExchange(asyncio.Protocol):
    """One request and its response on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.response = ResponseReader()
        self.pieces: list[tuple[float, bytes]] = []
        self.error: str | None = None
        self.closed_at: float | None = None
        self.closed = asyncio.Event()
        self.arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            body = self.response.feed(data)
        except WireError as error:
            self.fail(str(error))
            return
        if body:
            self.pieces.append((time.perf_counter(), body))
        self.arrived.set()
        if self.response.done:
            self.close()

    def eof_received(self) -> None:
        try:
            self.response.feed_eof()
        except WireError as error:
            self.fail(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.response.done and self.error is None:
            self.error = f"connection lost: {error or 'closed by the server'}"
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


class Stream:
    """A streamed completion. Reading ``log`` parses what has arrived so far."""

    def __init__(self, exchange: _HttpExchange, log: StreamLog) -> None:
        self._exchange = exchange
        self._events = EventReader()
        self._taken = 0
        self._log = log

    @property
    def log(self) -> StreamLog:
        exchange, log = self._exchange, self._log
        log.status, log.headers = exchange.response.status, exchange.response.headers
        log.closed_at = exchange.closed_at
        pieces, self._taken = exchange.pieces[self._taken :], len(exchange.pieces)
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
    """Client of one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url: expected http://host[:port], got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._gate = asyncio.Semaphore(MAX_CONNECTING)

    async def call(self, method: str, path: str, body: Any = None, timeout: float = 120.0) -> Reply:
        """Send one request and return its complete reply. body: JSON, or raw bytes. Raises WireError or OSError, and
        TimeoutError after ``timeout`` seconds."""
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
        return Reply(exchange.response.status, parsed)

    def upload(self, path: str, data: bytes, timeout: float = 600.0) -> tuple[int, Any]:
        """Send ``data`` as octet-stream, and return the status and the parsed reply. Blocks, and copies nothing. Raises
        OSError or WireError."""
        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request("POST", self._prefix + path, data, {"Content-Type": "application/octet-stream"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (HTTPException, ValueError) as error:
            raise WireError(f"POST {path}: {error}") from error
        finally:
            connection.close()

    async def stream(self, path: str, body: dict[str, Any], request_id: str, log: StreamLog | None = None) -> Stream:
        """Send a streamed request; return when it is written, without waiting for an answer. Its
        ``sent_at`` is the time of this call. log: gets the events; None = a new StreamLog."""
        log = log or StreamLog(request_id, time.perf_counter())
        return Stream(await self._send("POST", path, body), log)

    async def _send(self, method: str, path: str, body: Any) -> _HttpExchange:
        raw = isinstance(body, bytes)
        payload = body if raw else b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        kind = "application/octet-stream" if raw else "application/json"
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Accept: */*\r\nContent-Type: {kind}\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        async with self._gate:
            loop = asyncio.get_running_loop()
            _, exchange = await loop.create_connection(
                lambda: _HttpExchange(head.encode() + payload), self._host, self._port
            )
        return exchange
