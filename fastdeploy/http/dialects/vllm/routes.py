"""vLLM's routes, as SkyRL and TRL call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.vllm.control import add_control_routes
from fastdeploy.http.dialects.vllm.generate import add_generate_routes
from fastdeploy.http.dialects.vllm.info import add_information_routes
from fastdeploy.http.dialects.vllm.memory import add_memory_routes
from fastdeploy.http.dialects.vllm.tokenize import add_token_routes
from fastdeploy.http.dialects.vllm.weights import add_weight_routes


def vllm_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    for add_routes in (
        add_control_routes,
        add_generate_routes,
        add_information_routes,
        add_memory_routes,
        add_token_routes,
        add_weight_routes,
    ):
        add_routes(router, context)
    return router
