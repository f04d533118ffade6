"""POST /v1/replicas/spool: a file on this host for a gateway on another one, see fleet/remote.py."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.connection_limits import client_left
from fastdeploy.http.openapi import BYTES, JSON
from fastdeploy.http.upload import admitted_upload, spooled_upload


def spool_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    body = {"requestBody": {"required": True, "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}}

    @router.post("/v1/replicas/spool", openapi_extra=body)
    async def spool(request: Request) -> Response:
        """Keep the body, weights or an adapter, in a file for the engine of this server. The first line of the answer
        is ``{"path": ...}``. The answer does not end: the file is removed when the client closes the connection."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(admitted_upload(context, None))
            source = await stack.enter_async_context(spooled_upload(request, context))
            return _WhileConnected(source.path, stack.pop_all(), context.config.keepalive_s)

    return router


class _WhileConnected(Response):
    """Names the file, and closes ``file`` when the client goes away. An empty line is sent every ``keepalive_s``
    seconds, so that a client whose host has vanished is noticed."""

    media_type = JSON

    def __init__(self, path: str, file: contextlib.AsyncExitStack, keepalive_s: float):
        super().__init__()
        del self.headers["Content-Length"]
        self._line = msgspec.json.encode({"path": path}) + b"\n"
        self._file, self._keepalive_s = file, keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            line, left = self._line, False
            while not left:
                await send({"type": "http.response.body", "body": line, "more_body": True})
                line = b"\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._keepalive_s):
                        await client_left(scope, receive)
                        left = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
