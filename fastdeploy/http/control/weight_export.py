"""GET /v1/weights/export: the weights that serve, as one safetensors file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from io import FileIO
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import UpdateInProgress
from fastdeploy.core.safe_files import open_regular
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.context import ServingContext
from fastdeploy.inter_communicator.messages import ExportWeightsArgs

if TYPE_CHECKING:
    import httpx

PIECE_BYTES = 1 << 20
PASSED_ON = ("content-length", "x-weight-", "x-adapter-")  # headers of a replica's answer
PLAIN = " !#$&'()*+,/:;=?@[]"  # besides letters, digits and _.-~, left as they are in a version in a header


def export_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/weights/export")
    async def export_weights(request: Request) -> Response:
        """Answer the weights that serve, with the names of the checkpoint and in the serving dtype. Headers:
        X-Weight-Epoch, X-Weight-Version (percent-encoded), X-Weight-Fingerprint and X-Weight-EOS-Token-Ids. Steps go on
        meanwhile. The gateway of a fleet answers the weights of one replica."""
        if isinstance(context.client, FleetClient) and (answer := context.client.remote_export()) is not None:
            return await passed_on(answer)
        export = await _export(context.client)
        headers = {
            "Content-Length": str(export["nbytes"]),
            "X-Weight-Epoch": str(export["weight_epoch"]),
            "X-Weight-Version": in_header(export["version"]),
            "X-Weight-Fingerprint": export["fingerprint"],
            "X-Weight-EOS-Token-Ids": ",".join(map(str, export["eos_token_ids"])),
        }
        file = _take(export["path"])
        return StreamingResponse(pieces(file), headers=headers, media_type="application/octet-stream")

    return router


def in_header(version: str) -> str:
    """Return a version as the value of a header, percent-encoded."""
    return quote(version, safe=PLAIN)


async def passed_on(export: contextlib.AbstractAsyncContextManager[httpx.Response]) -> Response:
    """Return the answer of a replica on another host, which is passed on as it comes."""
    async with contextlib.AsyncExitStack() as stack:
        reply = await stack.enter_async_context(export)
        headers = {name: value for name, value in reply.headers.items() if name.startswith(PASSED_ON)}
        body = _received(reply, stack.pop_all())
        return StreamingResponse(body, headers=headers, media_type="application/octet-stream")


async def _received(reply: httpx.Response, stack: contextlib.AsyncExitStack) -> AsyncIterator[bytes]:
    async with stack:
        async for piece in reply.aiter_bytes(PIECE_BYTES):
            yield piece


async def _export(client: ServingClient) -> dict[str, Any]:
    """Have the weights exported. If this call is cancelled, the file is removed when it is there."""
    call = asyncio.ensure_future(client.call(ExportWeightsArgs()))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        call.add_done_callback(_discard)
        raise


def _discard(call: asyncio.Future[dict[str, Any]]) -> None:
    if not call.cancelled() and call.exception() is None:
        with contextlib.suppress(OSError):
            os.unlink(call.result()["path"])


def _take(path: str) -> FileIO:
    """Open the file, and remove its name: the system frees the file when it is closed, whatever becomes of the
    reply. Raises UpdateInProgress if an API server that has just started took it for a leftover."""
    try:
        fd = open_regular(path)
        os.unlink(path)
    except FileNotFoundError as error:
        raise UpdateInProgress("the exported file is gone: ask again") from error
    return os.fdopen(fd, "rb", buffering=0)


async def pieces(file: FileIO) -> AsyncIterator[bytes]:
    """Yield the content of ``file``, and close it."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
