"""Native weight routes: /v1/update_weights, /v1/weights/{begin,chunk,commit,abort}, /v1/sleep, /v1/wakeup."""

from __future__ import annotations

from fastapi import APIRouter

from fastdeploy.entrypoints.openai.context import ServingContext


def weights_router(context: ServingContext) -> APIRouter:
    return APIRouter()
