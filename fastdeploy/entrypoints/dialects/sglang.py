"""SGLang's routes, as slime, AReaL and verl call them."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.openai.context import ServingContext


def sglang_router(context: ServingContext) -> APIRouter:
    return APIRouter()
