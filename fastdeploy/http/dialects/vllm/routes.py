"""vLLM's routes, as SkyRL and TRL call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.vllm import adapters, control, generate, info, tokenize, weights


def vllm_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    for module in (adapters, control, generate, info, tokenize, weights):
        module.add_routes(router, context)
    return router
