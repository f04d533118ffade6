"""SGLang's routes, as slime, AReaL and verl call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.dialects.sglang_control import add_control_routes
from fastdeploy.entrypoints.dialects.sglang_generate import add_generate_route
from fastdeploy.entrypoints.dialects.sglang_weights import add_weight_routes
from fastdeploy.entrypoints.openai.context import ServingContext


def sglang_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    add_generate_route(router, context)
    add_control_routes(router, context)
    add_weight_routes(router, context)
    return router
