"""SGLang's routes, as slime, AReaL and verl call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import add_absent_routes
from fastdeploy.http.dialects.sglang import adapters, control, generate, info, weights

NO_GROUP = "this device has no process group for weights: use /update_weights_from_disk or /update_weights_from_tensor"
NO_IPC = "this device has no CUDA IPC handles: use /update_weights_from_disk or /update_weights_from_tensor"
NO_PROFILER = "this server has no profiler"
# SGLang's routes for which this device, or this server, has nothing.
ABSENT = {
    "/init_weights_update_group": NO_GROUP,
    "/update_weights_from_distributed": NO_GROUP,
    "/destroy_weights_update_group": NO_GROUP,
    "/update_weights_from_ipc": NO_IPC,
    "/start_profile": NO_PROFILER,
    "/stop_profile": NO_PROFILER,
}


def sglang_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    for module in (generate, control, info, weights, adapters):
        module.add_routes(router, context)
    add_absent_routes(router, ABSENT, reason_field="error_message")
    return router
