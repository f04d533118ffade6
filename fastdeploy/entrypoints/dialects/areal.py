"""AReaL's private routes for vLLM."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.openai.context import ServingContext


def areal_router(context: ServingContext) -> APIRouter:
    return APIRouter()
