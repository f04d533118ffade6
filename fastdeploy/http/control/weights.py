"""Native weight routes: /v1/update_weights, /v1/weights (info) and /v1/weights/{begin,chunk,commit,abort}, /v1/sleep,
/v1/wakeup, /v1/reset.

Tensors come from a folder (model_path), from shared memory, or as the body itself. Such a body is one safetensors file,
its type is application/octet-stream, and all other fields are in the query.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import Source
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.pause import add_call, envelope, read
from fastdeploy.http.control.protocol import (
    AbortUpdateBody,
    BeginBody,
    CommitBody,
    PartBody,
    ResetBody,
    SleepBody,
    SourceBody,
    UpdateWeightsBody,
    WakeBody,
    WeightInfoBody,
)
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import admitted_upload, is_upload, spooled_upload
from fastdeploy.inter_communicator import messages as m


def weights_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client = context.client

    async def call(args: m.Args) -> Response:
        return envelope(await client.call(args))

    @router.post("/v1/update_weights", openapi_extra=takes(UpdateWeightsBody, upload=UpdateWeightsBody))
    async def update_weights(request: Request) -> Response:
        """Change the weights. A call with a version and no tensors changes only the label."""
        body = await read(request, UpdateWeightsBody)
        if body.names_no_source and not is_upload(request):
            return await call(_relabel(body))
        fields = body.rest()
        if not is_upload(request):
            return await call(m.UpdateWeightsArgs(_named_source(body), **fields))
        _refuse_second_source(body)
        begin = m.BeginUpdateArgs(**{k: fields[k] for k in m.BeginUpdateArgs.__struct_fields__ if k in fields})
        check = m.CheckUpdateArgs(begin=begin, form=body.form)
        async with admitted_upload(context, check), spooled_upload(request, context) as source:
            return await call(m.UpdateWeightsArgs(source, **fields))

    @router.get("/v1/weights", openapi_extra=asks(WeightInfoBody))
    async def weight_info(request: Request) -> Response:
        body = await read(request, WeightInfoBody)
        return await call(m.WeightInfoArgs(checksums=body.checksums))

    @router.post("/v1/weights/begin", openapi_extra=takes(BeginBody, query=True))
    async def begin(request: Request) -> Response:
        body = await read(request, BeginBody)
        return await call(m.BeginUpdateArgs(**body.options()))

    @router.post("/v1/weights/chunk", openapi_extra=takes(PartBody, upload=PartBody))
    async def chunk(request: Request) -> Response:
        body = await read(request, PartBody)
        if not is_upload(request):
            return await call(m.UpdatePartArgs(source=_named_source(body), **body.rest()))
        _refuse_second_source(body)
        check = m.CheckUpdateArgs(body.session_id, form=body.form)
        async with admitted_upload(context, check), spooled_upload(request, context) as source:
            return await call(m.UpdatePartArgs(source=source, **body.rest()))

    add_call(router, client, "/v1/weights/commit", CommitBody, m.CommitUpdateArgs)
    add_call(router, client, "/v1/weights/abort", AbortUpdateBody, m.AbortUpdateArgs)
    add_call(router, client, "/v1/sleep", SleepBody, m.SleepArgs)
    add_call(router, client, "/v1/wakeup", WakeBody, m.WakeArgs)
    add_call(router, client, "/v1/reset", ResetBody, m.ResetArgs)
    return router


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
