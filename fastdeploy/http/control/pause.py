"""Native control routes: /v1/pause, /v1/resume, /v1/renew, /v1/is_paused, /v1/abort_requests.

Each route takes its fields from a JSON body, from the query, or from both. With ``lora_name`` the call concerns the
requests of that adapter only. The answer comes when the work is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.http.calls import Routes, envelope, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import AbortBody, PauseBody, RenewBody, ResumeBody, ScopedBody
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m


def control_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client, routes = context.client, Routes(router, read, envelope)

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
