"""Limits of request bodies: the size of one body, and the memory of all bodies that are being received."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.client.pace import wait_for_slice
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import RequestTooLarge
from fastdeploy.fleet.chain import SPOOL
from fastdeploy.http.errors import error_response
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.guards.connection_limits import has_large_body

# Routes that take weights or adapters: as the body itself, or as base64 in JSON (SGLang).
UPLOAD_PATHS = frozenset({"/v1/adapters/load", SPOOL, "/v1/update_weights", "/v1/weights/chunk", "/update_weights"})
JSON_UPLOAD_PATHS = frozenset({"/load_lora_adapter_from_tensors", "/update_weights_from_tensor"})
PLAN_BYTES = 1 << 20  # the most that a body for SPOOL has before the bytes of the file
LARGE_JSON = 1 << 20  # bytes; the event loop parses at most one larger body in each of its rounds


class BodyLimit:
    """Middleware that refuses a body beyond --max-body-mb, or beyond --max-upload-mb for weights. A body that declares
    its length is refused before it is read, and any other body as soon as it exceeds the limit.

    A body of more than 64 KiB is received only when --max-bodies-mb has room for all of it. Uploads of weights have
    other limits (upload.py). If a response begins before the whole body was received, the connection is closed and the
    rest of the body is not read. slice_lock: see Pace.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, slice_lock: asyncio.Lock):
        self._app = app
        self._config = config
        self._slice_lock = slice_lock
        limit = "the memory for bodies of requests (--max-bodies-mb)"
        self._memory = Budget(config.max_bodies_mb << 20, config.body_idle_s, limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        upload = _is_upload(scope["path"], headers.get(b"content-type", b""))
        limit, error = self._limit(upload, scope["path"])
        declared = int(headers.get(b"content-length", b"0"))
        complete = not has_large_body(scope["headers"])
        to_acquire = 0 if complete or upload else declared or limit  # bytes to acquire from the budget
        size = taken = 0

        async def limited_receive() -> Message:
            nonlocal complete, to_acquire, size, taken
            if to_acquire:
                wanted, to_acquire = to_acquire, 0
                taken = await self._memory.acquire(wanted)
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise error
            if message["type"] == "http.request" and not message.get("more_body", False):
                complete = True
                self._memory.release(taken)
                taken = 0
                if size > LARGE_JSON and not upload:
                    await wait_for_slice(self._slice_lock)
            return message

        def closing_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and not complete:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            return send(message)

        if declared > limit:
            await error_response(error)(scope, receive, closing_send)
            return
        try:
            await self._app(scope, limited_receive, closing_send)
        finally:
            self._memory.release(taken)

    def _limit(self, upload: bool, path: str) -> tuple[int, RequestTooLarge]:
        """Return the largest number of bytes of a body, and the error for a larger body."""
        if not upload:
            return _limit_of("--max-body-mb", self._config.max_body_mb)
        limit, error = upload_limit(self._config)
        return limit + (PLAN_BYTES if path == SPOOL else 0), error


def upload_limit(config: ServeConfig) -> tuple[int, RequestTooLarge]:
    """Return the largest number of bytes of an upload, and the error for a larger one."""
    return _limit_of("--max-upload-mb", config.max_upload_mb)


def _limit_of(flag: str, megabytes: int) -> tuple[int, RequestTooLarge]:
    limit = megabytes << 20
    return limit, RequestTooLarge(f"the request body has more than {limit} bytes ({flag})")


def _is_upload(path: str, content_type: bytes) -> bool:
    raw = content_type.lower().startswith(b"application/octet-stream")
    return path in JSON_UPLOAD_PATHS or (raw and path in UPLOAD_PATHS)
