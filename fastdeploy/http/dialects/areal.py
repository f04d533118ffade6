"""AReaL's private routes for vLLM. AReaL generates by /v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.body import LaxBody
from fastdeploy.http.calls import Routes
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import load_folder
from fastdeploy.http.control.protocol import LoraName, Version
from fastdeploy.http.dialects.common import add_absent_routes, place_pause, resume, sglang_error, success
from fastdeploy.inter_communicator import messages as m

NO_GROUP = "this device has no process group for weights: use /areal_update_weights with a model_path"
NO_ADAPTER_GROUP = "this device has no process group for weights: use /areal_update_weights_lora with a lora_model_path"
# AReaL's routes for which this device, or this server, has nothing.
ABSENT = {
    "/areal_init_weights_update_group": NO_GROUP,
    "/areal_set_update_weight_meta": NO_GROUP,
    "/areal_update_weights_xccl": NO_GROUP,
    "/areal_set_update_weight_meta_lora": NO_ADAPTER_GROUP,
    "/areal_update_weights_lora_xccl": NO_ADAPTER_GROUP,
}


class UpdateBody(LaxBody):
    """The folder of new weights. abort_all_requests: AReaL pauses before an update, and the pause aborts. The update
    itself aborts nothing."""

    model_path: str = Field(min_length=1)
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: Literal[False] = False
    version: Version | None = None


class UpdateAdapterBody(LaxBody):
    lora_model_path: str = Field(min_length=1)
    lora_name: LoraName


def areal_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, routes = context.client, Routes(router)

    @routes.post("/areal_pause_generation", LaxBody, errors=sglang_error())
    async def pause_generation(_: LaxBody) -> dict[str, Any]:
        """Answer when the engine is quiesced. AReaL's client resubmits the requests that were aborted."""
        mode, ttl_s = context.config.areal_pause_mode, context.config.dialect_hold_ttl_s
        report = await place_pause(client, mode, None, "areal", ttl_s)
        return success("Generation paused", report=report)

    @routes.post("/areal_continue_generation", LaxBody, errors=sglang_error())
    async def continue_generation(_: LaxBody) -> dict[str, Any]:
        return success("Generation continued", report=await resume(client))

    @routes.post("/areal_update_weights", UpdateBody, errors=sglang_error())
    async def update_weights(body: UpdateBody) -> dict[str, Any]:
        """Read the folder before the reply, since AReaL then deletes the folder. The KV of requests in flight is
        computed again under the new weights, as in AReaL. A paused engine stays paused."""
        args = m.UpdateWeightsArgs(FolderSource(body.model_path), version=body.version, kv="recompute")
        return success("TP rank: 0 success\n", report=await client.call(args))

    @routes.post("/areal_update_weights_lora", UpdateAdapterBody, errors=sglang_error())
    async def update_adapter(body: UpdateAdapterBody) -> dict[str, Any]:
        """Load an adapter, or replace the adapter of this name, as /areal_update_weights does for the base model."""
        report = await load_folder(context, body.lora_name, body.lora_model_path, kv="recompute")
        return success("TP rank: 0 success\n", report=report)

    add_absent_routes(router, ABSENT)
    return router
