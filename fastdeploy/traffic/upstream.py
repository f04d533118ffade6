"""The recorder's connections to the engine.

This is no httpx, which sends the whole request before it reads: if an engine refused an upload and read no more of it,
the two would wait for each other, and a client that asks for "100 Continue" would get none. Here, a connection reads
while it sends. A piece of a reply is a chunk as the engine sent it, or what one read gave of a longer chunk.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections import deque
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

from fastdeploy.core.errors import InvalidField, shown_url
from fastdeploy.traffic.file import Headers
from fastdeploy.traffic.headers import content_length, value_of

CONNECT_S = 10.0
IDLE_S = 1.0  # an idle connection is used again within this time, because servers close theirs after some seconds
MAX_WAITING_BYTES = 256 << 10  # of a reply, before no more is read
CONTINUE_S = 1.0  # wait for "100 Continue", which a server need not send


class UpstreamFailed(Exception):
    """The engine cannot be reached, or it broke the connection or HTTP. The message says which."""


class Connection(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._reset("")

    def _reset(self, method: str) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._method = method
        self.status = 0
        self.headers: Headers = []
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_head = self._complete = self._reusable = False
        self._error: str | None = None
        self._changed = asyncio.Event()
        self.go_on = asyncio.Event()  # "100 Continue", or an answer

    # ------------------------------------------------------------------ the recorder's side

    async def send_head(self, method: str, target: str, headers: Headers) -> None:
        """Begin a request."""
        self._reset(method)
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def send(self, data: bytes) -> None:
        """Send bytes. Returns early if the connection is broken: the reply tells about that."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            await self._writable.wait()

    async def head(self) -> None:
        """Wait until ``status`` and ``headers`` are there. Raises UpstreamFailed."""
        while not self._has_head:
            await self._change()

    async def piece(self) -> bytes | None:
        """Return the next piece of the reply's body; None at its end. Raises UpstreamFailed."""
        while not self._pieces:
            if self._complete:
                return None
            await self._change()
        data = self._pieces.popleft()
        self._waiting_bytes -= len(data)
        if self._transport is not None and self._waiting_bytes <= MAX_WAITING_BYTES:
            self._transport.resume_reading()
        return data

    async def _change(self) -> None:
        if self._error is not None:
            raise UpstreamFailed(self._error)
        self._changed.clear()
        await self._changed.wait()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the reply is complete and the engine keeps the connection open."""
        return self._complete and self._reusable and self.is_open

    def abort(self) -> None:
        """Close the connection at once, which cancels the request."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ calls of the event loop and of the parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of another class

    def data_received(self, data: bytes) -> None:
        if self._complete:  # bytes that belong to no reply
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it answered with another protocol than HTTP/1.1")
        except httptools.HttpParserError as error:
            self._fail(f"its answer is no HTTP/1.1: {error}")
        self._changed.set()
        if self._transport is not None and self._waiting_bytes > MAX_WAITING_BYTES:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        until_close = self._has_head and content_length(self.headers) is None
        until_close = until_close and "chunked" not in value_of(self.headers, "transfer-encoding").lower()
        if until_close and error is None:
            self._complete = True
        elif not self._complete:
            place = "in the middle of a reply" if self._has_head else "without an answer"
            self._error = self._error or f"it closed the connection {place}" + (f": {error}" if error else "")
        self._transport = None
        self._writable.set()
        self._changed.set()
        self.go_on.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else of the trailer
            self.headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.go_on.set()
        if (status := self._parser.get_status_code()) < 200:
            self.headers = []
            return
        self.status, self._has_head = status, True
        self._complete = self._method == "HEAD"

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _fail(self, text: str) -> None:
        self._error = text
        self.abort()


class Upstream:
    """The engine at a URL. netloc: for the header Host. Raises InvalidField for a URL of another form."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise InvalidField("upstream", f"expected http://HOST:PORT, got {shown_url(url)!r}")
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc.rpartition("@")[2]
        self.prefix = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{self.netloc}{self.prefix}"
        self.authorization = _basic(parts.username, parts.password)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[Connection] = []

    async def connect(self) -> Connection:
        """Return a connection, which has no request. Raises UpstreamFailed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamFailed(f"no connection within {CONNECT_S:.0f} s") from None
        except OSError as error:
            raise UpstreamFailed(f"cannot connect: {error}") from None
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for another request if its reply is complete, else close it."""
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()


def _basic(user: str | None, password: str | None) -> str | None:
    """Return the header of a user in a URL."""
    if user is None:
        return None
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
