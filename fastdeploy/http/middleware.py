"""Middleware around all routes."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.core.errors import FastDeployError
from fastdeploy.http.errors import error_response

EVENT_STREAMS = ("/ui/events",)  # streams that GET opens


class Guard:
    """Answers the error that ``check`` returns for a request, without reading the body of the request."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], FastDeployError | None]):
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        await (error_response(error) if error else self._app)(scope, receive, send)


class Routing:
    """Serves /path/ as /path, and HEAD as GET. A redirect to /path would lose the body of the request. The HTTP server
    sends no body in the answer to a HEAD request. HEAD of an event stream is not served (405): its answer would not end
    before the stream, and the next request on the connection would wait."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            as_get = scope["method"] == "HEAD" and path not in EVENT_STREAMS
            scope = {**scope, "path": path, "method": "GET" if as_get else scope["method"]}
        await self._app(scope, receive, send)


class LastResort:
    """Answers an unexpected exception with a JSON error, so that the connection stays open."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


class TraceId:
    """Copies X-Request-Id from the request to the response, so that a service mesh can match them."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = next((value for name, value in scope.get("headers", ()) if name == b"x-request-id"), None)
        if trace is None:
            await self._app(scope, receive, send)
            return

        async def traced_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", trace)]
            await send(message)

        await self._app(scope, receive, traced_send)
