"""Native control routes: /v1/pause, /v1/resume, /v1/renew, /v1/is_paused, /v1/abort_requests.

Each takes a JSON body, query parameters, both, or nothing, and answers when it is done, in FastDeploy's envelope.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import Body, BodyType, parse_body, parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import CONTROL_UNSUPPORTED, AbortBody, PauseBody, RenewBody, ResumeBody
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.http.upload import is_upload
from fastdeploy.inter_communicator import messages as m

# Query parameters that may be repeated.
LISTS = frozenset({"req_ids", "tags"})


def control_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    client = context.client

    @router.post("/v1/pause", openapi_extra=takes(PauseBody, query=True))
    async def pause(request: Request) -> Response:
        body = await read(request, PauseBody)
        return envelope(await client.call(m.PauseArgs(**body.model_dump())))

    @router.post("/v1/resume", openapi_extra=takes(ResumeBody, query=True))
    async def resume(request: Request) -> Response:
        body = await read(request, ResumeBody)
        return envelope(await client.call(m.ResumeArgs(hold_id=body.hold_id)))

    @router.post("/v1/renew", openapi_extra=takes(RenewBody, query=True))
    async def renew(request: Request) -> Response:
        body = await read(request, RenewBody)
        return envelope(await client.call(m.RenewArgs(**body.model_dump())))

    @router.get("/v1/is_paused")
    async def is_paused(request: Request) -> Response:
        await read(request, Body)
        return envelope(await client.call(m.PauseStatusArgs()))

    @router.post("/v1/abort_requests", openapi_extra=takes(AbortBody, query=True))
    async def abort_requests(request: Request) -> Response:
        body = await read(request, AbortBody)
        if body.abort_all == (body.req_ids is not None):
            raise InvalidField("req_ids", "expected either req_ids or abort_all: true")
        args = m.AbortArgs(request_ids=body.req_ids, abort_all=body.abort_all)
        return envelope(await client.call(args))

    return router


async def read(request: Request, kind: type[BodyType]) -> BodyType:
    """The fields of the query, with those of the JSON body over them. A call that names an adapter is refused."""
    body = {} if is_upload(request) else parse_json(await request.body())
    query: dict[str, Any] = dict(request.query_params)
    query |= {name: request.query_params.getlist(name) for name in LISTS & query.keys()}
    return parse_body({**query, **body}, kind, CONTROL_UNSUPPORTED)


def envelope(result: dict[str, Any]) -> Response:
    return json_response(
        {"request_id": f"control-{uuid.uuid4().hex}", "status": "success", "error_message": None, "result": result}
    )
