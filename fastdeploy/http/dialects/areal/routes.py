"""AReaL's private routes for vLLM. AReaL generates by /v1/completions."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Version
from fastdeploy.http.dialects.common import (
    add_absent_routes,
    place_pause,
    read_control,
    resume,
    sglang_errors,
    success,
)
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

NO_GROUP = "this device has no process group for weights: use /areal_update_weights with a model_path"
NO_ADAPTERS = "this server serves no adapters: use /areal_update_weights with merged weights"
# AReaL's routes for which this device, or this server, has nothing.
ABSENT = {
    "/areal_init_weights_update_group": NO_GROUP,
    "/areal_set_update_weight_meta": NO_GROUP,
    "/areal_update_weights_xccl": NO_GROUP,
    "/areal_set_update_weight_meta_lora": NO_ADAPTERS,
    "/areal_update_weights_lora": NO_ADAPTERS,
    "/areal_update_weights_lora_xccl": NO_ADAPTERS,
}


class UpdateBody(LaxBody):
    """abort_all_requests: AReaL pauses before an update, and the pause aborts. The update aborts nothing."""

    model_path: str = Field(min_length=1)
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: Literal[False] = False
    version: Version | None = None


def areal_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, config = context.client, context.config

    @router.post("/areal_pause_generation")
    @sglang_errors()
    async def pause_generation(request: Request) -> Response:
        """Answer when the engine is quiesced. AReaL's client resubmits the requests that were aborted."""
        await read_control(request, LaxBody)
        report = await place_pause(context, config.areal_pause_mode, None, placed_by="areal")
        return success("Generation paused", report=report)

    @router.post("/areal_continue_generation")
    @sglang_errors()
    async def continue_generation(request: Request) -> Response:
        await read_control(request, LaxBody)
        return success("Generation continued", report=await resume(context))

    @router.post("/areal_update_weights", openapi_extra=takes(UpdateBody, query=True))
    @sglang_errors()
    async def update_weights(request: Request) -> Response:
        """Read the folder before the reply, since AReaL then deletes the folder. The KV of requests in flight is
        computed again under the new weights, as in AReaL. A paused engine stays paused."""
        body = await read_control(request, UpdateBody)
        source = FolderSource(body.model_path)
        args = m.UpdateWeightsArgs(source, version=body.version, kv="recompute")
        return success("TP rank: 0 success\n", report=await client.call(args))

    add_absent_routes(router, ABSENT)
    return router
