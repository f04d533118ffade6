"""vLLM's /pause, /resume, /is_paused, /abort_requests and /reset_prefix_cache."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from fastdeploy.http.body import Body, LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import Routes, place_pause, resume
from fastdeploy.http.errors import json_response
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


def add_routes(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)

    @routes.post("/pause", PauseBody)
    async def pause(body: PauseBody) -> dict[str, Any]:
        """Answer when the engine is quiesced."""
        mode = body.mode or ("wait" if body.wait_for_inflight_requests else context.config.vllm_pause_mode)
        report = await place_pause(client, mode, body.clear_cache, placed_by="vllm")
        return {"status": "paused", "report": report}

    @routes.post("/resume", LaxBody)
    async def resume_generation(_: LaxBody) -> dict[str, Any]:
        return {"status": "resumed", "report": await resume(client)}

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response(await client.call(m.PauseStatusArgs()))

    @routes.post("/reset_prefix_cache", ResetBody)
    async def reset_prefix_cache(body: ResetBody) -> dict[str, Any]:
        """Drop the prefix cache. The call is never refused, also if there are frozen requests."""
        return {"success": True, **await client.call(m.ResetCacheArgs(running=body.reset_running_requests))}

    @routes.post("/abort_requests", AbortBody)
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        ids = body.request_ids
        result = await client.call(m.AbortArgs(request_ids=ids) if ids else m.AbortArgs(abort_all=True))
        reply = {"status": "aborted", "aborted": len(result["aborted"])}
        return {**reply, "requests": result["aborted"], "not_found": result["not_found"]}

    @routes.post("/inference/v1/abort_requests", AbortTheseBody)
    async def abort_these(body: AbortTheseBody) -> dict[str, Any]:
        return await client.call(m.AbortArgs(request_ids=body.request_ids))
