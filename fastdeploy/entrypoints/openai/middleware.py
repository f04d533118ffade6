"""What happens to every HTTP request before and around its route."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fastdeploy.entrypoints.openai.errors import error_body, error_response
from fastdeploy.errors import InvalidField, RequestTooLarge


class HttpProtocol(HttpToolsProtocol):
    """Answers bytes that are no HTTP with our JSON, and closes the connection, as uvicorn would."""

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(error_body(InvalidField("request", msg)))
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class Routing:
    """Serves /path/ as /path, without a redirect, which would lose the body; and HEAD as GET, of which the HTTP server
    sends no body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            scope = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        await self._app(scope, receive, send)


class LastResort:
    """Answers an exception that nobody expected, so that the HTTP server does not drop the connection for it."""

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
            return  # nobody waits for an answer
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


class TraceId:
    """Sends an X-Request-Id back as it came, so that a mesh can tell which reply belongs to which trace."""

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


# Weights come by these: as the body itself, or (SGLang's) as base64 in JSON.
UPLOAD_PATHS = frozenset({"/v1/update_weights", "/v1/weights/chunk", "/update_weights"})
JSON_UPLOAD_PATHS = frozenset({"/update_weights_from_tensor"})


class BodyLimit:
    """Refuses a body of more than ``max_bytes`` (``max_upload_bytes`` where it is weights): at once if its length is
    declared, or else where it passes the limit. What a client sends all the same is not kept."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int):
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        upload = _is_upload(scope.get("path", ""), headers.get(b"content-type", b""))
        limit = self._max_upload_bytes if upload else self._max_bytes
        error = RequestTooLarge(
            f"the request body has more than {limit} bytes ({'--max-upload-mb' if upload else '--max-body-mb'})"
        )
        if int(headers.get(b"content-length", b"0")) > limit:
            await error_response(error)(scope, receive, send)
            return
        size = 0

        async def counted_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise error
            return message

        await self._app(scope, counted_receive, send)


def _is_upload(path: str, content_type: bytes) -> bool:
    raw = content_type.lower().startswith(b"application/octet-stream")
    return path in JSON_UPLOAD_PATHS or (raw and path in UPLOAD_PATHS)
