"""The replay: a server that answers from a recording and compares the new run with it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import MutableMapping, Set
from typing import Any

from fastdeploy.core.listener import bind, url_of
from fastdeploy.core.process import collect_rarely
from fastdeploy.traffic.bodies import IGNORED, Asked, LiveBody
from fastdeploy.traffic.file import MAX_REQUEST_BYTES, Exchange, Headers, Outcome, Recording, read_recording
from fastdeploy.traffic.headers import content_length
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
from fastdeploy.traffic.keys import KeyRemover
from fastdeploy.traffic.matching import Book
from fastdeploy.traffic.order import is_control
from fastdeploy.traffic.report import Answered, Difference, Kind, Report, compare

REPORT = "/replay/report"
NO_RETRY = (("x-should-retry", "false"),)  # OpenAI's clients would send the request again after a 409 or a 501
STAY_S = 5.0  # a client that left in the recording gets this time to leave now


class Replay:
    """The server, as an ASGI application. speed: 1: as fast as recorded; 2: twice as fast; 0: at once. loose: whether
    a request that was not recorded is answered with the next recorded one of its route."""

    def __init__(self, recording: Recording, speed: float, loose: bool, ignored: Set[str] = IGNORED):
        self._speed, self._loose, self._ignored = speed, loose, ignored
        self._book = Book(recording.exchanges, ignored)
        self._remover = KeyRemover()
        self._answered: list[Answered] = []
        self._calls_over = 0

    def report(self) -> Report:
        return compare(self._book, self._answered)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        method, target, headers = scope["method"], target_of(scope), headers_of(scope)
        if (method, target) == ("GET", REPORT):
            await send_json(send, 200, self.report().as_json())
            return
        began = time.monotonic()
        body = LiveBody(headers, MAX_REQUEST_BYTES)
        while (message := await receive())["type"] != "http.disconnect":
            body.add(message.get("body", b""))
            if not message.get("more_body", False):
                break
        else:
            return  # the recording has no bodies that broke off either
        asked = body.asked(method, target, headers, self._remover, self._ignored)
        one = self._find(asked, began)
        self._answered.append(one)
        try:
            await self._answer(one, receive, send)
        finally:
            one.ended = time.monotonic()
            if is_control(method, asked.path) and one.expected is not None:
                self._calls_over += 1

    def _find(self, asked: Asked, began: float) -> Answered:
        """Return the recorded request for a new one, with what is different in it."""
        if (expected := self._book.take(asked, self._calls_over)) is not None:
            return Answered(asked, began, expected)
        name, times = f"{asked.method} {asked.path}", self._book.times(asked)
        nearest = None
        if not self._book.knows_route(asked):
            difference = Difference(Kind.UNKNOWN_ROUTE, f"{name} is not in the recording")
        elif times:
            text = f"{name}: this request was recorded {times} times, and came once more"
            difference = Difference(Kind.ASKED_MORE_OFTEN, text)
        else:
            found = self._book.nearest(asked)
            assert found is not None  # the route is known
            nearest, fields = found
            text = f"{name} is not in the recording; the nearest one is {nearest.exchange.name}, which differs in"
            difference = Difference(Kind.BODY, text, fields)
        expected = self._book.take_next(asked) if self._loose else None
        return Answered(asked, began, expected, difference, nearest)

    async def _answer(self, one: Answered, receive: Receive, send: Send) -> None:
        if one.expected is None:
            assert one.difference is not None
            status = 404 if one.difference.kind is Kind.UNKNOWN_ROUTE else 409
            await _send_difference(send, status, one.difference)
            return
        exchange = one.expected.exchange
        if not exchange.reply_kept:
            text = f"{exchange.name}: the recording has only the size of this reply; record with --bodies all"
            one.difference = Difference(Kind.NOT_KEPT, text)
            await _send_difference(send, 501, one.difference)
            return
        replying = asyncio.create_task(self._reply(exchange, send))
        leaving = asyncio.create_task(_until_client_left(receive))
        try:
            await asyncio.wait((replying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if replying.done():
                replying.result()
                if exchange.outcome is Outcome.CLIENT_LEFT:
                    await asyncio.wait((leaving,), timeout=STAY_S)
                    one.client_stayed = not leaving.done()
            else:
                one.client_left = True
        finally:
            replying.cancel()
            leaving.cancel()
            await asyncio.gather(replying, leaving, return_exceptions=True)

    async def _reply(self, exchange: Exchange, send: Send) -> None:
        """Send the recorded reply; one that broke off breaks off again."""
        assert exchange.sent is not None
        start, begin = time.monotonic(), exchange.sent
        if exchange.status is None:
            if exchange.outcome is not Outcome.CLIENT_LEFT:
                text = f"the recording ends before the reply to {exchange.name}"
                await send_json(send, 504, error_body(504, "not_recorded", text))
            return
        await self._sleep_until(start, exchange.answered - begin)
        is_complete = exchange.reply_size is not None
        await send_head(send, exchange.status, _reply_headers(exchange, is_complete))
        for at, data in exchange.pieces:
            await self._sleep_until(start, at - begin)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if is_complete:
            await send({"type": "http.response.body", "body": b""})

    async def _sleep_until(self, start: float, after: float) -> None:
        if self._speed and (wait := start + after / self._speed - time.monotonic()) > 0:
            await asyncio.sleep(wait)


def _reply_headers(exchange: Exchange, is_complete: bool) -> Headers:
    """Return the recorded headers. A body from which keys were removed may have another length."""
    no_body = exchange.status in (204, 304)
    if exchange.method == "HEAD" or not (no_body or is_complete) or content_length(exchange.reply_headers) is None:
        return exchange.reply_headers
    headers = [(name, value) for name, value in exchange.reply_headers if name.lower() != "content-length"]
    size = sum(len(data) for _, data in exchange.pieces)
    return headers if no_body else [*headers, ("content-length", str(size))]


async def _until_client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_difference(send: Send, status: int, difference: Difference) -> None:
    text = "\n".join(difference.lines())
    fields = [field._asdict() for field in difference.fields[:10]]
    await send_json(send, status, error_body(status, "not_in_recording", text, differences=fields), NO_RETRY)


def replay(file: str, host: str, port: int, speed: float, loose: bool, ignored: Set[str]) -> int:
    """Answer from a recording until SIGINT or SIGTERM. Return the exit status: 0 if the new run is the same, else 1.
    Raises InvalidField, which names the flag; OSError if the port is in use."""
    import uvloop

    recording = read_recording(file)
    with bind(host, port) as listener:
        return uvloop.run(_replay(recording, listener, file, Replay(recording, speed, loose, IGNORED | ignored)))


async def _replay(recording: Recording, listener: socket.socket, file: str, app: Replay) -> int:
    url = url_of(listener)
    print(f"Replaying {file} at {url}: use this URL in place of {recording.opening.upstream}", flush=True)
    print(f"GET {url}{REPORT} says what is different up to then", flush=True)
    collect_rarely()
    await make_server(app).serve(sockets=[listener])
    report = app.report()
    print(report.text(), flush=True)
    return 0 if report.same else 1
