"""Native weight routes: /v1/update_weights, /v1/weights (info) and /v1/weights/{begin,chunk,commit,abort}, /v1/sleep,
/v1/wakeup, /v1/reset.

Tensors come from a folder (model_path), from shared memory, or as the body itself: application/octet-stream, one
safetensors file, with all other fields in the query.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FolderSource, SharedMemorySource, Source
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.pause import envelope, read
from fastdeploy.http.control.protocol import (
    AbortUpdateBody,
    BeginBody,
    ChunkBody,
    CommitBody,
    ResetBody,
    SleepBody,
    SourceBody,
    UpdateWeightsBody,
    WakeBody,
    WeightInfoBody,
)
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import is_upload, spooled_upload
from fastdeploy.inter_communicator import messages as m


def weights_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client = context.client

    async def call(args: m.Args) -> Response:
        return envelope(await client.call(args))

    @router.post("/v1/update_weights", openapi_extra=takes(UpdateWeightsBody, upload=UpdateWeightsBody))
    async def update_weights(request: Request) -> Response:
        """With a version and no tensors, only the label changes."""
        body = await read(request, UpdateWeightsBody)
        if body.names_no_source and not is_upload(request):
            return await call(_relabel(body))
        begin = m.BeginUpdateArgs(body.version, body.expected_version, body.kv, body.partial, body.in_place)
        async with _source(request, context, body, m.CheckUpdateArgs(begin=begin)) as source:
            return await call(m.UpdateWeightsArgs(source, **body.rest()))

    @router.get("/v1/weights", openapi_extra=asks(WeightInfoBody))
    async def weight_info(request: Request) -> Response:
        body = await read(request, WeightInfoBody)
        return await call(m.WeightInfoArgs(checksums=body.checksums))

    @router.post("/v1/weights/begin", openapi_extra=takes(BeginBody, query=True))
    async def begin(request: Request) -> Response:
        return await call(m.BeginUpdateArgs(**(await read(request, BeginBody)).model_dump()))

    @router.post("/v1/weights/chunk", openapi_extra=takes(ChunkBody, upload=ChunkBody))
    async def chunk(request: Request) -> Response:
        body = await read(request, ChunkBody)
        async with _source(request, context, body, m.CheckUpdateArgs(body.session_id)) as source:
            return await call(m.UpdateChunkArgs(source=source, **body.rest()))

    @router.post("/v1/weights/commit", openapi_extra=takes(CommitBody, query=True))
    async def commit(request: Request) -> Response:
        return await call(m.CommitUpdateArgs(**(await read(request, CommitBody)).model_dump()))

    @router.post("/v1/weights/abort", openapi_extra=takes(AbortUpdateBody, query=True))
    async def abort(request: Request) -> Response:
        return await call(m.AbortUpdateArgs(**(await read(request, AbortUpdateBody)).model_dump()))

    @router.post("/v1/sleep", openapi_extra=takes(SleepBody, query=True))
    async def sleep(request: Request) -> Response:
        body = await read(request, SleepBody)
        args = m.SleepArgs(tuple(body.tags), mode=body.mode, discard=body.discard, timeout_s=body.timeout_s)
        return await call(args)

    @router.post("/v1/wakeup", openapi_extra=takes(WakeBody, query=True))
    async def wakeup(request: Request) -> Response:
        return await call(m.WakeArgs(tuple((await read(request, WakeBody)).tags)))

    @router.post("/v1/reset", openapi_extra=takes(ResetBody, query=True))
    async def reset(request: Request) -> Response:
        return await call(m.ResetArgs(version=(await read(request, ResetBody)).version))

    return router


@contextlib.asynccontextmanager
async def _source(
    request: Request, context: ServingContext, body: SourceBody, check: m.CheckUpdateArgs
) -> AsyncIterator[Source]:
    """The source that the call names, or its own body in a file for as long as the block lasts. check: asked before
    such a body is received."""
    if is_upload(request):
        if not body.names_no_source:
            raise InvalidField("model_path", "the body of this call is an upload: name no other source")
        async with spooled_upload(request, context, check) as source:
            yield source
    elif body.model_path is not None and body.shared_memory is None:
        yield FolderSource(body.model_path)
    elif body.shared_memory is not None and body.model_path is None:
        yield SharedMemorySource(body.shared_memory, body.nbytes)
    else:
        raise InvalidField("model_path", "expected one of model_path, shared_memory, or an octet-stream body")


def _relabel(body: UpdateWeightsBody) -> m.SetVersionArgs:
    for field in ("expected_version", "partial", "in_place", "checksums", "verify_checksum", "timeout_s"):
        if getattr(body, field):
            raise InvalidField(field, "is about new weights: expected model_path, shared_memory or an upload with it")
    if body.version is None:
        raise InvalidField("model_path", "expected model_path, shared_memory, an octet-stream body, or a version")
    return m.SetVersionArgs(body.version)
