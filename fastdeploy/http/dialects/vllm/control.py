"""vLLM's /pause, /resume, /is_paused, /abort_requests and /reset_prefix_cache."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.http.body import Body, LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import place_pause, read_control, resume
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m


class PauseBody(LaxBody):
    """clear_cache: vLLM's default is true in every mode. After a pause with mode keep, the frozen requests are then
    recomputed, which TRL relies on. wait_for_inflight_requests: an older form of mode=wait."""

    mode: Literal["abort", "wait", "keep"] | None = None
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False


class AbortBody(Body):
    """No ids, or an empty list, means every request. Unknown fields are refused, so that a misspelled field name does
    not abort every request."""

    request_ids: list[str] = []


class AbortTheseBody(Body):
    request_ids: list[str]


class ResetBody(LaxBody):
    reset_running_requests: bool = False


def add_control_routes(router: APIRouter, context: ServingContext) -> None:
    _add_pause(router, context)
    _add_abort(router, context)


def _add_pause(router: APIRouter, context: ServingContext) -> None:
    client, config = context.client, context.config

    @router.post("/pause", openapi_extra=takes(PauseBody, query=True))
    async def pause(request: Request) -> Response:
        """Answer when the engine is quiesced."""
        body = await read_control(request, PauseBody)
        mode = body.mode or ("wait" if body.wait_for_inflight_requests else config.vllm_pause_mode)
        report = await place_pause(context, mode, body.clear_cache, placed_by="vllm")
        return json_response({"status": "paused", "report": report})

    @router.post("/resume")
    async def resume_generation(request: Request) -> Response:
        await read_control(request, LaxBody)
        return json_response({"status": "resumed", "report": await resume(context)})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response(await client.call(m.PauseStatusArgs()))

    @router.post("/reset_prefix_cache", openapi_extra=takes(ResetBody, query=True))
    async def reset_prefix_cache(request: Request) -> Response:
        """Drop the prefix cache. The call is never refused, also if there are frozen requests."""
        body = await read_control(request, ResetBody)
        result = await client.call(m.ResetCacheArgs(running=body.reset_running_requests))
        return json_response({"success": True, **result})


def _add_abort(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    @router.post("/abort_requests", openapi_extra=takes(AbortBody, query=True))
    async def abort_requests(request: Request) -> Response:
        ids = (await read_control(request, AbortBody)).request_ids
        args = m.AbortArgs(request_ids=ids) if ids else m.AbortArgs(abort_all=True)
        result = await client.call(args)
        reply = {"status": "aborted", "aborted": len(result["aborted"])}
        return json_response({**reply, "requests": result["aborted"], "not_found": result["not_found"]})

    @router.post("/inference/v1/abort_requests", openapi_extra=takes(AbortTheseBody, query=True))
    async def abort_these(request: Request) -> Response:
        ids = (await read_control(request, AbortTheseBody)).request_ids
        return json_response(await client.call(m.AbortArgs(request_ids=ids)))
