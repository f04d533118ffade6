"""vLLM's routes, as SkyRL and TRL call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.vllm.control import add_control_routes
from fastdeploy.http.dialects.vllm.generate import add_generate_routes
from fastdeploy.http.dialects.vllm.info import add_information_routes
from fastdeploy.http.dialects.vllm.memory import add_memory_routes
from fastdeploy.http.dialects.vllm.tokens import add_token_routes
from fastdeploy.http.dialects.vllm.weights import add_weight_routes


def vllm_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    add_control_routes(router, context)
    add_generate_routes(router, context)
    add_information_routes(router, context)
    add_memory_routes(router, context)
    add_token_routes(router, context)
    add_weight_routes(router, context)
    return router
