"""Native routes that concern the running server: /v1/pause, /v1/resume, /v1/renew, /v1/is_paused, /v1/abort_requests;
and /health, /liveness, /ready, /version, /metrics, /v1/models, /v1/models/ID.

A route of the first kind takes its fields from a JSON body, from the query, or from both. With ``lora_name`` the call
concerns the requests of that adapter only. The answer comes when the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import PlainTextResponse, Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import EngineError, InvalidField, ModelNotFound, NotLeader
from fastdeploy.core.process import VERSION
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.http.calls import Routes, envelope, envelope_error, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import known_adapters
from fastdeploy.http.control.protocol import AbortBody, PauseBody, RenewBody, ResumeBody, ScopedBody
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m


class TextConvertor(Convertor[str]):
    """A path parameter that is all of the path that is left. Of starlette's convertor "path", a newline at the end
    would be lost."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("text", TextConvertor())


def control_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, routes = context.client, Routes(router, read, envelope, envelope_error)

    routes.call("/v1/pause", PauseBody, client, _scoped(m.PauseArgs))
    routes.call("/v1/resume", ResumeBody, client, _scoped(m.ResumeArgs))
    routes.call("/v1/renew", RenewBody, client, _scoped(m.RenewArgs))

    @routes.get("/v1/is_paused", ScopedBody, RouteAccess.DATA)
    async def is_paused(body: ScopedBody) -> dict[str, Any]:
        """Answer the pause status of the whole engine and of each adapter with a hold, or that of one adapter."""
        return await client.call(m.PauseStatusArgs(adapter_scope(body.lora_name)))

    @routes.post("/v1/abort_requests", AbortBody)
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        if (body.req_ids is not None) + body.abort_all + (body.lora_name is not None) != 1:
            raise InvalidField("req_ids", "expected exactly one of req_ids, abort_all: true and lora_name")
        return await client.call(m.AbortArgs(body.req_ids, body.abort_all, body.lora_name))

    return router


def _scoped(args: Callable[..., m.Args]) -> Callable[..., m.Args]:
    """Return a function that makes ``args`` with ``lora_name`` in place of ``scope``."""

    def make(lora_name: str | None, **fields: Any) -> m.Args:
        return args(scope=adapter_scope(lora_name), **fields)

    return make


def health_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, config = context.client, context.config
    started = int(time.time())

    @router.get("/health")
    @RouteAccess.OPEN
    async def health() -> Response:
        """Answer 200 while the engine process lives, paused or not. Answer 503 with a reason while the engine loads, or
        is being replaced because it died or was stuck."""
        return health_of(client)

    @router.get("/liveness")
    @RouteAccess.OPEN
    async def liveness() -> Response:
        """Answer 200 if the engine's loop answers, paused or not, as prime-rl's server does. A Kubernetes probe that
        restarts the server should allow for the time that a new engine takes to load."""
        try:
            await client.call(m.PauseStatusArgs())
        except (EngineError, NotLeader) as error:
            return _no_engine(client, error.message)
        return json_response({"status": "ok"})

    @router.get("/ready")
    @RouteAccess.OPEN
    async def ready() -> Response:
        """Answer 503 with a reason while no engine takes new requests, or all of them are refused. A pause that holds
        new requests refuses none."""
        try:
            status = await client.call(m.PauseStatusArgs())
        except (EngineError, NotLeader) as error:
            return _no_engine(client, error.message)
        if reason := client.closed_because:
            return _no_engine(client, reason)
        if status["rejecting_new_requests"] and status["admission"] == "reject":
            return json_response({"status": "rejecting new requests"}, 503, {"Retry-After": "2"})
        return json_response({"status": "ready"})

    @router.get("/version")
    @RouteAccess.OPEN
    async def version() -> Response:
        return json_response({"version": VERSION})

    @router.get("/metrics", response_class=PlainTextResponse)
    @RouteAccess.OPEN
    async def metrics() -> Response:
        result = await client.call(m.MetricsArgs())
        text = context.answer_counts.render() + result["text"]
        return Response(text, media_type="text/plain; version=0.0.4")

    @router.get("/sessions/{session}/v1/models")
    @router.get("/v1/models")
    @RouteAccess.DATA
    async def models() -> Response:
        """List the base model, then the adapters. An adapter is named in requests like a model."""
        return json_response({"object": "list", "data": await cards()})

    @router.get("/sessions/{session}/v1/models/{model_id:text}")
    @router.get("/v1/models/{model_id:text}")
    @RouteAccess.DATA
    async def model(model_id: str) -> Response:
        """Describe one model by any name that requests may use for it. An id may have slashes."""
        name = context.model_name(context.adapter(model_id))
        for card in await cards():
            if card["id"] == name:
                return json_response(card)
        raise ModelNotFound(f"model: {name!r} is not served here", param="model")

    async def cards() -> list[dict[str, Any]]:
        base, shared = config.served_model_name, {"object": "model", "created": started, "owned_by": "fastdeploy"}
        models: list[tuple[str, str | None, str | None]] = [(base, config.model, None)]
        models += [(a["lora_name"], a["path"] or None, base) for a in await known_adapters(context)]
        return [
            {"id": name, **shared, "root": root, "parent": parent, "max_model_len": context.max_model_len}
            for name, root, parent in models
        ]

    return router


def health_of(client: ServingClient) -> Response:
    """Return the answer of /health."""
    if client.welcome is not None and client.connected.is_set():
        return json_response({"status": "ok", "boot_id": client.welcome.boot_id})
    return _no_engine(client, client.missing_because)


def _no_engine(client: ServingClient, reason: str) -> Response:
    if (loading := client.loading) is None:
        return json_response({"status": "no engine", "reason": reason}, 503, {"Retry-After": "2"})
    what = {"stage": loading.stage, "share": loading.share}
    return json_response({"status": "loading", "reason": reason, "loading": what}, 503, {"Retry-After": "2"})
