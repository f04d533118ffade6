"""vLLM's routes, as SkyRL and TRL call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.dialects.vllm_control import add_control_routes
from fastdeploy.entrypoints.dialects.vllm_generate import add_generate_routes
from fastdeploy.entrypoints.dialects.vllm_info import add_information_routes
from fastdeploy.entrypoints.dialects.vllm_memory import add_memory_routes
from fastdeploy.entrypoints.dialects.vllm_tokens import add_token_routes
from fastdeploy.entrypoints.dialects.vllm_weights import add_weight_routes
from fastdeploy.entrypoints.openai.context import ServingContext


def vllm_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    add_control_routes(router, context)
    add_generate_routes(router, context)
    add_information_routes(router, context)
    add_memory_routes(router, context)
    add_token_routes(router, context)
    add_weight_routes(router, context)
    return router
