"""Limits of one HTTP connection: bytes of headers, time without progress, and the number of open connections."""

from __future__ import annotations

import asyncio
import functools
from enum import Enum
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError, HeadersTooLarge, InvalidField, RequestTimeout, ServerBusy
from fastdeploy.http.errors import error_response
from fastdeploy.http.guards.body_receiver import EXTENSION, BodyReceiver, LingeringTransport

CLOSE = "fastdeploy.close"  # an ASGI extension: closes the connection as it is
# An ASGI extension: sends a part of a streamed body to the client. Middleware looks only at the start and the end of a
# response, and to pass all of it took 8 % of the CPU of a token. Middleware that needs the parts removes this.
SEND_PART = "fastdeploy.send_part"
WATCHED = "fastdeploy.client_left"  # an ASGI extension, set by a route that wants to know of a half-closed connection
MAX_HEADERS = 256
MAX_PIPELINED = 16  # requests that wait behind an earlier one on the same connection
MIN_PROGRESS = 1 << 20  # bytes that must arrive of an incomplete body in each body_idle_s


class ReadPhase(Enum):
    IDLE = "idle"  # no request is being received
    HEAD = "head"
    BODY = "body"


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits of ``settings``. A connection that exceeds a limit, or sends no valid HTTP, is
    answered with a JSON error and closed. A body of more than 64 KiB is not read before the route asks for it."""

    transport: LingeringTransport  # set by connection_made

    def __init__(self, settings: ServeConfig, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._settings = settings
        self._phase = ReadPhase.IDLE
        self._timer: asyncio.TimerHandle | None = None
        self._receiver: BodyReceiver | None = None  # of the last request
        self._num_headers = self._head_bytes = self._unparsed = self._progress = 0
        self._answering: RequestResponseCycle | None = None  # the request that is being answered, or was the last time
        self._half_closed = False  # the client sends nothing more, and perhaps waits for answers
        self._refusal: FastDeployError | None = None  # set in a callback of the parser, sent after the parser returns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(LingeringTransport(cast(asyncio.Transport, transport), self.loop))
        limit = self._settings.max_connections
        if len(self.connections) > limit:
            self.transport.unread = True
            self._refuse(ServerBusy(f"more than {limit} open connections (--max-connections)"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._answering is not None:  # uvicorn tells the newest request only, which may still wait behind this one
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        if self._phase is ReadPhase.IDLE:
            self._expect_head()
        self.transport.unread = True
        in_head = self._phase is ReadPhase.HEAD
        self._progress += len(data)
        super().data_received(data)
        if in_head and self._phase is ReadPhase.HEAD:
            self._unparsed += len(data)
            self._check_head(self._unparsed)
        if self._refusal is not None and not self.transport.is_closing():
            self._refuse(self._refusal)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers to complete requests, if there are any: a client may close its sending
        side behind them. A client that has gone looks the same to this side."""
        answering = self._answering
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # its body will never be complete
        last = self.pipeline[0][0] if self.pipeline else answering
        if answering is None or last is None or last.response_complete or last.more_body:
            return False
        self.cycle, self._half_closed, last.keep_alive = last, True, False
        self._stop_timer()
        answering.message_event.set()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the client has sent nothing that is not answered."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and (self._phase is ReadPhase.IDLE or (self._phase is ReadPhase.HEAD and not self._progress))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, functools.partial(self._run, app))

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run ``app``. To a route that waits in :func:`client_left`, a half-closed connection looks like a closed one.
        The others send their answers."""
        extensions = scope.setdefault("extensions", {})
        extensions |= {CLOSE: self.transport.close, SEND_PART: send}

        async def receive_or_end() -> Message:
            return {"type": "http.disconnect"} if self._half_closed and WATCHED in extensions else await receive()

        await app(scope, receive_or_end, send)

    def _expect_head(self) -> None:
        self._phase = ReadPhase.HEAD
        self._num_headers = self._head_bytes = self._unparsed = self._progress = 0
        self._start_timer(self._settings.header_s)

    def _check_head(self, size: int) -> None:
        limit = self._settings.max_header_kb
        if size > limit << 10:
            self._refusal = HeadersTooLarge(f"the request line and headers exceed {limit} KiB")

    # ------------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not ReadPhase.HEAD:  # a pipelined request: the request before it is not yet answered
            self._expect_head()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = InvalidField("request", f"more than {MAX_PIPELINED} requests wait on one connection")

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        self._check_head(self._head_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not ReadPhase.HEAD:
            return  # a trailer after the body: dropped
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        self._check_head(self._head_bytes)
        if self._num_headers > MAX_HEADERS:
            self._refusal = HeadersTooLarge(f"more than {MAX_HEADERS} headers")
        if self._refusal is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = ReadPhase.BODY
        if self._refusal is not None:
            return
        super().on_headers_complete()
        self._start_timer(self._settings.body_idle_s)
        self._receiver = None
        if has_large_body(self.headers):
            self.flow.pause_reading()
            if not self.pipeline and (nbytes := _declared_length(self.headers)):
                linger_s = self._settings.body_idle_s
                self._receiver = BodyReceiver(
                    self, self.transport, nbytes, self._progressed, self._body_complete, linger_s
                )
                self.scope["extensions"] = {EXTENSION: self._receiver}  # type: ignore[dict-item]

    def _progressed(self, nbytes: int) -> None:
        self._progress += nbytes

    def _body_complete(self) -> None:
        """Go on behind a body that the parser has not seen."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = ReadPhase.IDLE
        self.transport.unread = False
        self._stop_timer()
        if self._refusal is None:
            super().on_message_complete()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._overdue)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        """End a connection that is too slow: its headers are incomplete, or its body made too little progress."""
        if self.transport.is_closing():
            return
        settings = self._settings
        if self._phase is ReadPhase.HEAD and self._progress == 0:
            self.transport.close()
        elif self._phase is ReadPhase.HEAD:
            self._refuse(RequestTimeout(f"the headers were not complete after {settings.header_s:g} s"))
        elif self._progress >= MIN_PROGRESS or self.flow.read_paused:  # read_paused: this server is the slow side
            self._progress = 0
            self._start_timer(settings.body_idle_s)
        else:
            why = f"fewer than {MIN_PROGRESS} bytes of the body in {settings.body_idle_s:g} s (--body-idle-s)"
            self._refuse(RequestTimeout(why))

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidField("request", msg))

    def _refuse(self, error: FastDeployError) -> None:
        """Answer with ``error`` and close the connection. Send no answer if the client would take it for the answer to
        an earlier request."""
        unanswered = self.cycle is not None and not self.cycle.response_complete
        if unanswered and self._phase is ReadPhase.BODY and not self.pipeline and not self.cycle.response_started:
            self.cycle.disconnected = True  # the route gets no more bytes, and cannot answer
            self.cycle.message_event.set()
            if self._receiver is not None:
                self._receiver.give_up()
            unanswered = False
        if not unanswered:
            response = error_response(error)
            head = [b"%b: %b\r\n" % header for header in [*response.raw_headers, (b"connection", b"close")]]
            self.transport.write(b"".join([STATUS_LINE[response.status_code], *head, b"\r\n", response.body]))
        self._stop_timer()
        self.transport.close()


def _declared_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length of the body; 0 = unknown."""
    given = dict(headers)
    return 0 if b"transfer-encoding" in given else int(given[b"content-length"])


def has_large_body(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the body is longer than uvicorn's read-ahead, or of unknown length."""
    given = dict(headers)
    return b"transfer-encoding" in given or int(given.get(b"content-length", b"0")) > HIGH_WATER_LIMIT


async def client_left(scope: Scope, receive: Receive) -> None:
    """Return when the client has gone. The body must have been read. A client that closes only its sending side looks
    like one that has gone, and counts as gone here."""
    scope.setdefault("extensions", {})[WATCHED] = {}
    while (await receive())["type"] != "http.disconnect":
        pass
