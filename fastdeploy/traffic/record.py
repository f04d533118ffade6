"""The recorder: a proxy before an engine, which writes what passes through it to a file.

Nothing waits for the file: records are written on a thread of their own. If the file cannot be written any more, the
traffic goes on, and the recorder says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import MutableMapping
from typing import Any

import uvloop
from blake3 import blake3

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.listener import bind, url_of
from fastdeploy.core.process import VERSION, collect_rarely
from fastdeploy.traffic.file import Begin, Body, End, Head, Headers, Opening, Outcome, Piece, RecordWriter, Side
from fastdeploy.traffic.headers import content_length, encoding_of, end_to_end, is_json, is_opaque, value_of
from fastdeploy.traffic.http import (
    Receive,
    Send,
    error_body,
    headers_of,
    make_server,
    send_head,
    send_json,
    target_of,
)
from fastdeploy.traffic.upstream import CONTINUE_S, Connection, Upstream, UpstreamFailed
from fastdeploy.traffic.writer import MAX_TEXT_BYTES, BackgroundWriter

SMALL_BYTES = 1 << 20  # a reply of data up to this size is kept


class _Tally:
    """The size and the hash of a body that passes, and its pieces for the file as long as these are kept."""

    def __init__(self, writer: BackgroundWriter, exchange: int, side: Side, kept: bool, limit: int | None):
        self._writer, self._exchange, self._side = writer, exchange, side
        self._kept, self._limit = kept, limit
        self._size, self._hash = 0, blake3()

    async def add(self, at: float, data: bytes) -> None:
        self._size += len(data)
        self._hash.update(data)
        if self._limit is not None and self._size > self._limit:
            self._kept = False
        if self._kept:
            self._writer.put(Piece(self._exchange, at, self._side, data))
            await self._writer.room()

    def finish(self, at: float) -> None:
        digest = self._hash.hexdigest() if self._size else ""
        self._writer.put(Body(self._exchange, at, self._side, self._size, digest, self._kept))


class Recorder:
    """The proxy, as an ASGI application. keep_all: whether uploads and other data are kept in the file."""

    def __init__(self, upstream: Upstream, writer: BackgroundWriter, keep_all: bool):
        self.upstream, self.writer, self.keep_all = upstream, writer, keep_all
        self._start = time.monotonic()
        self.requests = 0
        self._running: set[asyncio.Task[None] | None] = set()

    def now(self) -> float:
        return time.monotonic() - self._start

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        self.requests += 1
        exchange = _Exchange(self, self.requests, scope, receive, send)
        outcome, error = Outcome.RECORDER_STOPPED, ""
        self._running.add(task := asyncio.current_task())
        try:
            outcome = await exchange.run()
        except UpstreamFailed as failure:
            outcome, error = Outcome.UPSTREAM_FAILED, str(failure)
        finally:
            self.writer.put(End(exchange.id, self.now(), outcome, error))
            self._running.discard(task)

    async def finish(self) -> None:
        """Wait for the requests that the server has cancelled at its end."""
        await asyncio.gather(*filter(None, self._running), return_exceptions=True)


class _Exchange:
    """One request and its reply."""

    def __init__(self, recorder: Recorder, number: int, scope: MutableMapping[str, Any], receive: Receive, send: Send):
        self.id = number
        self._recorder, self._upstream, self._writer = recorder, recorder.upstream, recorder.writer
        self._method, self._target, self._headers = scope["method"], target_of(scope), headers_of(scope)
        self._receive, self._send = receive, send
        self._is_sent = False
        begin = Begin(self.id, recorder.now(), self._method, self._target, self._headers)
        self._writer.put(begin)

    async def run(self) -> Outcome:
        """Pass the request and its reply on. A reply that breaks off breaks off for the client, too. Raises
        UpstreamFailed."""
        try:
            connection = await self._upstream.connect()
        except UpstreamFailed as failure:
            await self._refuse(failure)
            raise
        sending = asyncio.create_task(self._pass_request(connection))
        replying = asyncio.create_task(self._pass_reply(connection))
        try:
            await asyncio.wait((sending, replying), return_when=asyncio.FIRST_COMPLETED)
            if not replying.done():
                return Outcome.CLIENT_LEFT
            replying.result()
            return Outcome.COMPLETE
        finally:
            sending.cancel()
            replying.cancel()
            await asyncio.gather(sending, replying, return_exceptions=True)
            if self._is_sent:
                self._upstream.give_back(connection)
            else:
                connection.abort()

    async def _pass_request(self, connection: Connection) -> None:
        """Send the request. Then wait until the client leaves or has its reply."""
        chunked = "chunked" in value_of(self._headers, "transfer-encoding").lower()
        await connection.send_head(self._method, self._upstream.prefix + self._target, self._passed_headers(chunked))
        if "100-continue" in value_of(self._headers, "expect").lower():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONTINUE_S):
                    await connection.go_on.wait()
            if connection.status:  # refused: reading the body would tell the client to send it
                await asyncio.Event().wait()
        opaque = is_opaque(self._headers) or encoding_of(self._headers) != ""
        kept = self._recorder.keep_all or not opaque
        tally = _Tally(self._writer, self.id, Side.REQUEST, kept, None if opaque else MAX_TEXT_BYTES)
        while (message := await self._receive())["type"] != "http.disconnect":
            if data := message.get("body", b""):
                at = self._recorder.now()
                await connection.send(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
                await tally.add(at, data)
            if not message.get("more_body", False):
                if chunked:
                    await connection.send(b"0\r\n\r\n")
                tally.finish(self._recorder.now())
                self._is_sent = True
                break
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _passed_headers(self, chunked: bool) -> Headers:
        headers = [(name, value) for name, value in end_to_end(self._headers) if name != "host"]
        headers.insert(0, ("host", self._upstream.netloc))
        if chunked:
            headers.append(("transfer-encoding", "chunked"))
        if self._upstream.authorization is not None and not value_of(headers, "authorization"):
            headers.append(("authorization", self._upstream.authorization))
        return headers

    async def _pass_reply(self, connection: Connection) -> None:
        try:
            await connection.head()
        except UpstreamFailed as failure:
            await self._refuse(failure)
            raise
        status, headers = connection.status, end_to_end(connection.headers)
        self._writer.put(Head(self.id, self._recorder.now(), status, headers))
        if status in (204, 304):  # uvicorn would wait for a body of this length
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        await send_head(self._send, status, headers)
        tally = self._reply_tally(headers)
        while (data := await connection.piece()) is not None:
            at = self._recorder.now()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            await tally.add(at, data)
        await self._send({"type": "http.response.body", "body": b""})
        tally.finish(self._recorder.now())

    def _reply_tally(self, headers: Headers) -> _Tally:
        size = content_length(headers)
        kept = self._recorder.keep_all or not is_opaque(headers) or (size is not None and size <= SMALL_BYTES)
        searched_whole = is_json(headers) or encoding_of(headers) != ""
        return _Tally(self._writer, self.id, Side.REPLY, kept, MAX_TEXT_BYTES if searched_whole else None)

    async def _refuse(self, failure: UpstreamFailed) -> None:
        """Answer for an engine that gives no answer."""
        message = f"the upstream {self._upstream.url} of `fastdeploy record` failed: {failure}"
        self._writer.put(Head(self.id, self._recorder.now(), 502, [("content-type", "application/json")]))
        tally = _Tally(self._writer, self.id, Side.REPLY, True, None)
        body = await send_json(
            self._send, 502, error_body(502, "upstream_failed", message, upstream=self._upstream.url)
        )
        await tally.add(self._recorder.now(), body)
        tally.finish(self._recorder.now())


def record(upstream_url: str, host: str, port: int, out: str, keep_all: bool) -> int:
    """Record until SIGINT or SIGTERM. Return the exit status: 1 if the file could not be written to its end. Raises
    InvalidField, which names the flag; OSError if the port is in use."""
    upstream = Upstream(upstream_url)
    listener = bind(host, port)
    with listener:
        if _is_at(upstream, listener):
            raise InvalidField("upstream", f"expected an engine, got the address of this recorder, {upstream.url}")
        opening = Opening(version=VERSION, upstream=upstream.url, began=time.time())
        try:
            file = RecordWriter(out, opening)
        except FileExistsError:
            raise InvalidField("out", f"expected a new file, got {out!r}, which exists") from None
        except OSError as error:
            raise InvalidField("out", f"expected a place for a new file, got {out!r}: {error.strerror}") from None
        return uvloop.run(_record(upstream, listener, file, out, keep_all))


async def _record(upstream: Upstream, listener: socket.socket, file: RecordWriter, out: str, keep_all: bool) -> int:
    def failed(reason: str) -> None:
        print(f"fastdeploy record: {out} cannot be written: {reason}", file=sys.stderr)
        print("Nothing more is recorded. The traffic goes on.", file=sys.stderr, flush=True)

    writer = BackgroundWriter(file, failed)
    recorder = Recorder(upstream, writer, keep_all)
    print(f"Recording at {url_of(listener)}: use this URL in place of {upstream.url}", flush=True)
    collect_rarely()
    await make_server(recorder).serve(sockets=[listener])
    await recorder.finish()
    writer.close(recorder.now())
    print(f"{out}: {recorder.requests} requests, {file.nbytes} bytes" + (", not complete" if writer.error else ""))
    return 1 if writer.error else 0


def _is_at(upstream: Upstream, listener: socket.socket) -> bool:
    """Return whether the upstream is this listener."""
    host, port = listener.getsockname()[:2]
    if upstream.port != port:
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(upstream.host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # each request tells
    return host in found or (host in ("0.0.0.0", "::") and any(map(_is_of_this_host, found)))


def _is_of_this_host(address: Any) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
