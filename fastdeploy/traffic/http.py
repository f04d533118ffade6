"""The HTTP server of the recorder and of the replay: uvicorn, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

import uvicorn

from fastdeploy.traffic.file import Headers

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
STOP_S = 2  # that open connections get at the end
KEEP_ALIVE_S = 75  # longer than clients keep theirs, so that none meets a connection that closes


class HttpServer(uvicorn.Server):
    """A server whose process goes on after a stop signal, so that it can report."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def make_server(app: App) -> HttpServer:
    """Return a server that serves until SIGINT or SIGTERM. Requests that run then have STOP_S seconds left."""
    # A reply that breaks off on purpose is an error for uvicorn.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )
    return HttpServer(config)


def target_of(scope: MutableMapping[str, Any]) -> str:
    """Return path and query as the client sent them."""
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def headers_of(scope: MutableMapping[str, Any]) -> Headers:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


async def send_head(send: Send, status: int, headers: Headers) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_json(send: Send, status: int, content: Any, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """Send a whole reply, and return its body. headers: further ones."""
    body = json.dumps(content).encode()
    about_body = [("content-type", "application/json"), ("content-length", str(len(body)))]
    await send_head(send, status, [*about_body, *headers])
    await send({"type": "http.response.body", "body": body})
    return body


def error_body(status: int, kind: str, message: str, **detail: Any) -> dict[str, Any]:
    """Return the body of an error, in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "code": status, **detail}}
