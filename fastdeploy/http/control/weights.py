"""Native weight routes: /v1/update_weights, /v1/weights (info) and /v1/weights/{begin,chunk,commit,abort,export}; and
/v1/sleep, /v1/wakeup, /v1/reset.

Tensors come from a folder (model_path), from shared memory, or as the body itself. Such a body is one safetensors file,
its type is application/octet-stream, and all other fields are in the query.
"""

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
from fastdeploy.core.errors import InvalidField, UpdateInProgress
from fastdeploy.core.files import open_regular
from fastdeploy.core.weight_source import Source
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.calls import Routes, catching, envelope, envelope_error, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import (
    AbortUpdateBody,
    BeginBody,
    CommitBody,
    ExportBody,
    PartBody,
    ResetBody,
    SleepBody,
    SourceBody,
    UpdateWeightsBody,
    WakeBody,
    WeightInfoBody,
)
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import admitted_upload, is_upload, spooled_upload, upload_update
from fastdeploy.inter_communicator import messages as m

if TYPE_CHECKING:
    import httpx

PIECE_BYTES = 1 << 20
PASSED_ON = ("content-length", "x-weight-", "x-adapter-")  # headers of a replica's answer
PLAIN = " !#$&'()*+,/:;=?@[]"  # besides letters, digits and _.-~, left as they are in a version in a header


def weights_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, routes = context.client, Routes(router, read, envelope, envelope_error)

    @router.post("/v1/update_weights", openapi_extra=takes(UpdateWeightsBody, upload=UpdateWeightsBody))
    @catching(envelope_error)
    async def update_weights(request: Request) -> Response:
        """Change the weights. A call with a version and no tensors changes only the label; with --fastdeploy-form, it
        loads the folder of the model."""
        body = await read(request, UpdateWeightsBody)
        if context.config.fastdeploy_form and body.names_no_source and not is_upload(request):
            body.model_path = context.config.model
        if body.names_no_source and not is_upload(request):
            return envelope(await client.call(_relabel(body)))
        fields = body.rest()
        if not is_upload(request):
            return envelope(await client.call(m.UpdateWeightsArgs(_named_source(body), **fields)))
        _refuse_second_source(body)
        begin = m.BeginUpdateArgs(**{k: fields[k] for k in m.BeginUpdateArgs.__struct_fields__ if k in fields})
        check = m.CheckUpdateArgs(begin=begin, form=body.form)
        return envelope(await upload_update(request, context, check, body.checksums, body.verify_checksum))

    @routes.get("/v1/weights", WeightInfoBody)
    async def weight_info(body: WeightInfoBody) -> dict[str, Any]:
        return await client.call(m.WeightInfoArgs(body.checksums, body.fingerprints))

    @routes.post("/v1/weights/begin", BeginBody)
    async def begin(body: BeginBody) -> dict[str, Any]:
        return await client.call(m.BeginUpdateArgs(**body.options()))

    @router.post("/v1/weights/chunk", openapi_extra=takes(PartBody, upload=PartBody))
    @catching(envelope_error)
    async def chunk(request: Request) -> Response:
        body = await read(request, PartBody)
        async with _source(request, context, body, m.CheckUpdateArgs(body.session_id, form=body.form)) as source:
            return envelope(await client.call(m.UpdatePartArgs(source=source, **body.rest())))

    routes.call("/v1/weights/commit", CommitBody, client, m.CommitUpdateArgs)
    routes.call("/v1/weights/abort", AbortUpdateBody, client, m.AbortUpdateArgs)
    routes.call("/v1/sleep", SleepBody, client, m.SleepArgs)
    routes.call("/v1/wakeup", WakeBody, client, m.WakeArgs)
    routes.call("/v1/reset", ResetBody, client, m.ResetArgs)

    @router.get("/v1/weights/export", openapi_extra=asks(ExportBody))
    async def export_weights(request: Request) -> Response:
        """Answer the weights that serve, with the names of the checkpoint and in the serving dtype; with ``tensors``,
        these only. Headers: X-Weight-Epoch, X-Weight-Version (percent-encoded), X-Weight-Fingerprint and
        X-Weight-EOS-Token-Ids. Steps go on meanwhile. The gateway of a fleet answers the weights of one replica."""
        tensors = tuple((await read(request, ExportBody)).tensors)
        if isinstance(context.client, FleetClient) and (answer := context.client.remote_export(tensors)) is not None:
            return await passed_on(answer)
        file, headers = await open_export(context.client, tensors)
        return StreamingResponse(pieces(file), headers=headers, media_type="application/octet-stream")

    return router


@contextlib.asynccontextmanager
async def _source(
    request: Request, context: ServingContext, body: SourceBody, check: m.CheckUpdateArgs
) -> AsyncIterator[Source]:
    """Yield the source that the call names. An uploaded body is kept in a file while the block runs. check: asked of
    the engine before the body is received."""
    if not is_upload(request):
        yield _named_source(body)
    else:
        _refuse_second_source(body)
        async with admitted_upload(context, check), spooled_upload(request, context) as source:
            yield source


def _named_source(body: SourceBody) -> Source:
    return body.source("model_path", "model_path, shared_memory, or an octet-stream body")


def _refuse_second_source(body: SourceBody) -> None:
    if not body.names_no_source:
        raise InvalidField("model_path", "expected no other source beside the uploaded body")


def _relabel(body: UpdateWeightsBody) -> m.SetVersionArgs:
    for field, about in UpdateWeightsBody.model_fields.items():
        if field != "version" and getattr(body, field) != about.default:
            raise InvalidField(field, "expected with new weights only: model_path, shared_memory or an upload")
    if body.version is None:
        raise InvalidField("model_path", "expected model_path, shared_memory, an octet-stream body, or a version")
    return m.SetVersionArgs(body.version)


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


async def open_export(client: ServingClient, tensors: tuple[str, ...] = ()) -> tuple[FileIO, dict[str, str]]:
    """Return an export of the weights, whose file has no name any more, and the headers that describe it. tensors:
    names; none = all."""
    export = await _export(client, tensors)
    headers = {
        "Content-Length": str(export["nbytes"]),
        "X-Weight-Epoch": str(export["weight_epoch"]),
        "X-Weight-Version": in_header(export["version"]),
        "X-Weight-Fingerprint": export["fingerprint"],
        "X-Weight-EOS-Token-Ids": ",".join(map(str, export["eos_token_ids"])),
    }
    return _take(export["path"]), headers


async def _export(client: ServingClient, tensors: tuple[str, ...]) -> dict[str, Any]:
    """Have weights exported. If this call is cancelled, the file is removed when it is there."""
    call = asyncio.ensure_future(client.call(m.ExportWeightsArgs(tensors=tensors)))
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
