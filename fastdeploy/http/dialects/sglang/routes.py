"""SGLang's routes, as slime, AReaL and verl call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.sglang.control import add_control_routes
from fastdeploy.http.dialects.sglang.generate import add_generate_route
from fastdeploy.http.dialects.sglang.weights import add_weight_routes


def sglang_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    add_generate_route(router, context)
    add_control_routes(router, context)
    add_weight_routes(router, context)
    return router
