"""vLLM's routes, as SkyRL and TRL call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.openai.context import ServingContext


def vllm_router(context: ServingContext) -> APIRouter:
    return APIRouter()
