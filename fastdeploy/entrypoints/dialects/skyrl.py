"""SkyRL's own routes beside vLLM's."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.openai.context import ServingContext


def skyrl_router(context: ServingContext) -> APIRouter:
    return APIRouter()
