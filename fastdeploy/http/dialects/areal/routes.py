"""AReaL's private routes for vLLM. It generates by /v1/completions."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Version
from fastdeploy.http.dialects.common import LaxBody, place_pause, read_control, resume
from fastdeploy.http.dialects.sglang.weights import sglang_shape, success
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

NO_GROUP = "this device has no process group for weights: use /areal_update_weights with a model_path"
NO_ADAPTERS = "this server serves no adapters: use /areal_update_weights with merged weights"
# What AReaL's vLLM has and this device, or this server, has not.
ABSENT = {
    "/areal_init_weights_update_group": NO_GROUP,
    "/areal_set_update_weight_meta": NO_GROUP,
    "/areal_update_weights_xccl": NO_GROUP,
    "/areal_set_update_weight_meta_lora": NO_ADAPTERS,
    "/areal_update_weights_lora": NO_ADAPTERS,
    "/areal_update_weights_lora_xccl": NO_ADAPTERS,
}


class UpdateBody(LaxBody):
    """abort_all_requests: AReaL pauses before it updates, and that aborts; an update alone aborts nothing."""

    model_path: str = Field(min_length=1)
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: Literal[False] = False
    version: Version | None = None


def areal_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, config = context.client, context.config

    @router.post("/areal_pause_generation")
    @sglang_shape()
    async def pause_generation(request: Request) -> Response:
        """Answers when quiesced. AReaL's client resubmits what was aborted."""
        await read_control(request, LaxBody)
        report = await place_pause(context, config.areal_pause_mode, None, placed_by="areal")
        return success("Generation paused", report=report)

    @router.post("/areal_continue_generation")
    @sglang_shape()
    async def continue_generation(request: Request) -> Response:
        await read_control(request, LaxBody)
        return success("Generation continued", report=await resume(context))

    @router.post("/areal_update_weights", openapi_extra=takes(UpdateBody, query=True))
    @sglang_shape()
    async def update_weights(request: Request) -> Response:
        """The folder is read before the reply: AReaL deletes it then. KV of older weights is rebuilt under the new
        ones, as AReaL does it. A paused engine stays paused."""
        body = await read_control(request, UpdateBody)
        source = FolderSource(body.model_path)
        args = m.UpdateWeightsArgs(source, version=body.version, kv="recompute")
        return success("TP rank: 0 success\n", report=await client.call(args))

    for path, why in ABSENT.items():
        _add_refusal(router, path, why)
    return router


def _add_refusal(router: APIRouter, path: str, why: str) -> None:
    @router.post(path)
    @sglang_shape()
    async def refuse(request: Request) -> Response:
        raise InvalidField(path.removeprefix("/"), why)
