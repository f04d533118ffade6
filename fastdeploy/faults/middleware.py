"""The HTTP side of faults: headers that ask for them, answers that are refused, late, lost or broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.core import errors
from fastdeploy.core.errors import FastDeployError
from fastdeploy.faults.book import FaultBook, Happening
from fastdeploy.faults.injection import CURRENT, ConnectionBroken, Injection
from fastdeploy.faults.rules import HEADER, Rule, read_headers
from fastdeploy.faults.table import Place
from fastdeploy.http.errors import RETRY_AFTER, error_response
from fastdeploy.http.guards.connection_limits import CLOSE, SEND_PART

ROUTE = "/v1/faults"
NONE = "none"  # in place of a name: the request asked for a fault, and none happened
ERRORS: dict[int, type[FastDeployError]] = {
    429: errors.QueueFull,
    500: errors.EngineError,
    502: errors.FleetCallFailed,
    503: errors.EngineDead,
    504: errors.EngineStalled,
}


class LateReply:
    """An answer that waits until ``missing`` later requests are answered. number: of its request."""

    def __init__(self, number: int, missing: int):
        self.number, self.missing = number, missing
        self.may_go = asyncio.Event()


class FaultMiddleware:
    """Middleware that opens an Injection for each request, and does what the faults do to its answer. It is inside of
    the check of keys. may_control: returns the error for a request that may not ask for faults. jump(rule): lets a
    clock jump. is_fleet: see read_headers."""

    def __init__(
        self,
        app: ASGIApp,
        book: FaultBook,
        may_control: Callable[[Scope], FastDeployError | None],
        jump: Callable[[Rule], None],
        is_fleet: bool,
    ):
        self._app, self._book, self._may_control, self._jump, self._is_fleet = app, book, may_control, jump, is_fleet
        self._num_requests = 0
        self._late: list[LateReply] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ROUTE:
            await self._app(scope, receive, send)
            return
        header, trace = HEADER.lower().encode(), b"x-request-id"
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == header]
        try:
            if values and (error := self._may_control(scope)) is not None:
                raise error
            asked = read_headers(values, self._is_fleet)
        except FastDeployError as error:
            await error_response(error)(scope, receive, send)
            return
        trace_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == trace), "")
        injection = Injection(scope["path"], asked, trace_id)
        CURRENT.set(injection)
        answer = Answer(injection, self._book, send)
        scope.get("extensions", {}).pop(SEND_PART, None)  # the answer sees all parts
        self._num_requests += 1
        number = self._num_requests
        app: ASGIApp = self._app
        for rule, happening in await self._decide(scope, injection):
            injection.decided.append(happening)
            match rule.fault:
                case "http_error":
                    self._book.acted(happening)
                    app = _refusal(rule)
                case "reply_lost":
                    answer.lost = happening
                case "replies_reordered":
                    late = LateReply(number, int(rule.parameters["replies"]))
                    self._late.append(late)
                    answer.waits = late, float(rule.parameters["seconds"]), happening
                case "clock_jump":
                    self._book.acted(happening)
                    self._jump(rule)
        try:
            await app(scope, receive, answer.send)
        except ConnectionBroken as broken:
            await _break_off(broken, scope, receive)
        finally:
            self._answered(number)

    async def _decide(self, scope: Scope, injection: Injection) -> list[tuple[Rule, Happening]]:
        """Return the faults of the answer. A rule without a path is for POST requests."""
        is_post = scope["method"] == "POST"
        return await self._book.decide(
            Place.HTTP,
            injection.asked,
            injection.path,
            [injection.trace_id],
            fits=lambda rule: is_post or bool(rule.conditions["path"]) or rule.name == HEADER,
        )

    def _answered(self, number: int) -> None:
        """Let go what waits for the answer to this request."""
        self._late = [late for late in self._late if late.number != number]
        for late in self._late:
            if late.number < number:
                late.missing -= 1
                if late.missing <= 0:
                    late.may_go.set()


class Answer:
    """The answer to one request, on its way to the client. lost: it is not sent. waits: for what, for how many seconds
    at most, and the fault that makes it wait."""

    def __init__(self, injection: Injection, book: FaultBook, send: Send):
        self._injection, self._book, self._send = injection, book, send
        self.lost: Happening | None = None
        self.waits: tuple[LateReply, float, Happening] | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on, as the faults let it. Raises ConnectionBroken."""
        injection = self._injection
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif injection.silent and message.get("body", b"").startswith(b":"):
            return
        elif injection.broken is not None and message.get("body"):
            body = message["body"]
            await self._send({**message, "body": body[: len(body) // 2], "more_body": True})
            raise injection.broken
        await self._send(message)

    async def _begin(self, message: Message) -> None:
        """Send the headers, with the names of the faults: of a stream, those that will happen if it gets that far."""
        injection = self._injection
        if self.lost is not None:
            self._book.acted(self.lost)
            raise ConnectionBroken
        if self.waits is not None:
            late, seconds, happening = self.waits
            self._book.acted(happening)
            waiting = [asyncio.ensure_future(event.wait()) for event in (late.may_go, self._book.released)]
            try:
                await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
        headers = [*message.get("headers", ())]
        is_stream = any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type")
        names = [one.fault for one in injection.decided if one.acted or is_stream]
        if names or injection.asked:
            text = ", ".join(dict.fromkeys(names)) or NONE
            message["headers"] = [*headers, (b"x-fault-injected", text.encode())]


def _refusal(rule: Rule) -> ASGIApp:
    """Return what answers in place of the route."""
    status, retry_after = int(rule.parameters["status"]), int(rule.parameters["retry_after"])
    wait = RETRY_AFTER.get(status) if retry_after < 0 else retry_after
    detail = {} if wait is None else {"retry_after": wait}
    return error_response(ERRORS[status]("an injected fault (http_error)", **detail))


async def _break_off(broken: ConnectionBroken, scope: Scope, receive: Receive) -> None:
    """End the connection as it is, or this process."""
    if broken.end is not None:
        await asyncio.sleep(0.05)  # the event loop writes what was sent
        broken.end()
    scope["extensions"][CLOSE]()
    while (await receive())["type"] != "http.disconnect":  # without an answer, uvicorn would make one
        pass
