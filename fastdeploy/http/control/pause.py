"""Native control routes: /v1/pause, /v1/resume, /v1/renew, /v1/is_paused, /v1/abort_requests.

Each route takes its fields from a JSON body, from the query, or from both. With ``lora_name`` the call concerns the
requests of that adapter only. The answer comes when the work is done.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.scope import adapter_scope
from fastdeploy.http.body import Body, BodyType, parse_body, parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import (
    CONTROL_UNSUPPORTED,
    AbortBody,
    PauseBody,
    RenewBody,
    ResumeBody,
    ScopedBody,
)
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import is_upload
from fastdeploy.inter_communicator import messages as m

# Query parameters that may be repeated.
LISTS = frozenset({"req_ids", "tags"})


def control_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client = context.client

    add_call(router, client, "/v1/pause", PauseBody, scoped(m.PauseArgs))
    add_call(router, client, "/v1/resume", ResumeBody, scoped(m.ResumeArgs))
    add_call(router, client, "/v1/renew", RenewBody, scoped(m.RenewArgs))

    @router.get("/v1/is_paused", openapi_extra=asks(ScopedBody))
    async def is_paused(request: Request) -> Response:
        """Answer the pause status of the whole engine and of each adapter with a hold, or that of one adapter."""
        body = await read(request, ScopedBody)
        return envelope(await client.call(m.PauseStatusArgs(adapter_scope(body.lora_name))))

    @router.post("/v1/abort_requests", openapi_extra=takes(AbortBody, query=True))
    async def abort_requests(request: Request) -> Response:
        body = await read(request, AbortBody)
        if (body.req_ids is not None) + body.abort_all + (body.lora_name is not None) != 1:
            raise InvalidField("req_ids", "expected exactly one of req_ids, abort_all: true and lora_name")
        args = m.AbortArgs(body.req_ids, body.abort_all, body.lora_name)
        return envelope(await client.call(args))

    return router


def scoped(args: Callable[..., m.Args]) -> Callable[..., m.Args]:
    """Return a function that makes ``args`` with ``lora_name`` in place of ``scope``."""

    def make(lora_name: str | None, **fields: Any) -> m.Args:
        return args(scope=adapter_scope(lora_name), **fields)

    return make


def add_call(
    router: APIRouter, client: ServingClient, path: str, kind: type[Body], args: Callable[..., m.Args]
) -> None:
    """Add a POST route that passes all fields of its body to the engine as ``args``, and answers with the result."""

    @router.post(path, name=path.rpartition("/")[2], openapi_extra=takes(kind, query=True))
    async def call(request: Request) -> Response:
        body = await read(request, kind)
        return envelope(await client.call(args(**body.model_dump())))


async def read(request: Request, kind: type[BodyType]) -> BodyType:
    """Return the fields of the query and of the JSON body; the body wins. A call that names an adapter is refused,
    unless ``kind`` has the field lora_name."""
    body = {} if is_upload(request) else parse_json(await request.body())
    query: dict[str, Any] = dict(request.query_params)
    query |= {name: request.query_params.getlist(name) for name in LISTS & query.keys()}
    return parse_body({**query, **body}, kind, CONTROL_UNSUPPORTED)


def envelope(result: dict[str, Any]) -> Response:
    return json_response(
        {"request_id": f"control-{uuid.uuid4().hex}", "status": "success", "error_message": None, "result": result}
    )
