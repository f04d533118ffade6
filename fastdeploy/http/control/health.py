"""/health, /ready, /version, /metrics, /v1/models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from fastdeploy import __version__
from fastdeploy.core.errors import EngineError, NotLeader
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import known_adapters
from fastdeploy.http.errors import json_response
from fastdeploy.inter_communicator import messages as m


def health_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, config = context.client, context.config
    started = int(time.time())

    @router.get("/health")
    async def health() -> Response:
        """Answer 200 while the engine process lives, paused or not. Answer 503 with a reason while the engine loads, or
        is being replaced because it died or was stuck."""
        if client.welcome is not None and client.connected.is_set():
            return json_response({"status": "ok", "boot_id": client.welcome.boot_id})
        return json_response({"status": "no engine", "reason": client.missing_because}, 503, {"Retry-After": "2"})

    @router.get("/ready")
    async def ready() -> Response:
        """Answer 503 with a reason while new requests are refused. A pause that holds new requests refuses none."""
        try:
            status = await client.call(m.PauseStatusArgs())
        except (EngineError, NotLeader) as error:
            return json_response({"status": "no engine", "reason": error.message}, 503, {"Retry-After": "2"})
        if not client.connected.is_set():  # a gateway that does not lead answers reads only
            return json_response({"status": "no engine", "reason": client.missing_because}, 503, {"Retry-After": "2"})
        if status["rejecting_new_requests"] and status["admission"] == "reject":
            return json_response({"status": "rejecting new requests"}, 503, {"Retry-After": "2"})
        return json_response({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        result = await client.call(m.MetricsArgs())
        return Response(result["text"], media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> Response:
        """List the base model, then the adapters. An adapter is named in requests like a model."""
        adapters = await known_adapters(context)

        def card(name: str, root: str | None, parent: str | None) -> dict[str, Any]:
            about = {"id": name, "object": "model", "created": started, "owned_by": "fastdeploy"}
            return about | {"root": root, "parent": parent, "max_model_len": context.max_model_len}

        base = config.served_model_name
        cards = [card(adapter["lora_name"], adapter["path"] or None, base) for adapter in adapters]
        return json_response({"object": "list", "data": [card(base, config.model, None), *cards]})

    return router
