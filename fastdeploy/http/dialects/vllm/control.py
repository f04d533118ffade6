"""vLLM's routes that pause, abort, clear caches and free memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import Body, LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S, Routes, place_pause, resume
from fastdeploy.http.errors import json_response
from fastdeploy.inter_communicator import messages as m

# vLLM's names of memory -> our names.
TAGS = {"weights": "weight", "weight": "weight", "kv_cache": "kv_cache"}
EVERYTHING = ("weight", "kv_cache")


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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TagsBody(LaxBody):
    tags: Annotated[list[str], BeforeValidator(_as_list)] = []

    def ours(self) -> tuple[str, ...]:
        """Return our names of the tags. No tags means all memory."""
        for tag in self.tags:
            if tag not in TAGS:
                raise InvalidField("tags", f"expected some of weights, kv_cache, got {tag!r}")
        return tuple(dict.fromkeys(TAGS[tag] for tag in self.tags)) or EVERYTHING


class SleepBody(TagsBody):
    """level: 1 keeps the weights outside of the engine's memory. 2 drops the weights, which must be published again.
    mode: mode of the pause that a sleep implies."""

    level: int = 1
    mode: Literal["abort", "wait", "keep"] | None = None


def add_routes(router: APIRouter, context: ServingContext) -> None:
    _add_pause_and_abort(router, context)
    _add_memory(router, context)


def _add_pause_and_abort(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)

    @routes.post("/pause", PauseBody)
    async def pause(body: PauseBody) -> dict[str, Any]:
        """Answer when the engine is quiesced."""
        mode = body.mode or ("wait" if body.wait_for_inflight_requests else context.config.vllm_pause_mode)
        report = await place_pause(client, mode, body.clear_cache, "vllm", context.config.dialect_hold_ttl_s)
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


def _add_memory(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)

    @routes.post("/sleep", SleepBody)
    async def sleep(body: SleepBody) -> dict[str, Any]:
        if body.level not in (1, 2):
            raise InvalidField("level", f"expected 1 or 2, got {body.level}")
        sleeping = await asleep(client)
        tags = tuple(tag for tag in body.ours() if tag not in sleeping)
        if not tags:
            return {"status": "sleeping", "asleep": sleeping}
        mode, discard = body.mode or context.config.vllm_pause_mode, body.level == 2 and "weight" in tags
        args = m.SleepArgs(tags=tags, mode=mode, discard=discard, timeout_s=PAUSE_TIMEOUT_S)
        return {"status": "sleeping", **await client.call(args)}

    @routes.post("/wake_up", TagsBody)
    async def wake_up(body: TagsBody) -> dict[str, Any]:
        return {"status": "awake", **await wake(client, body.ours())}

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        sleeping = await asleep(client)
        return json_response({"is_sleeping": bool(sleeping), "asleep": sleeping})


async def asleep(client: ServingClient) -> list[str]:
    return sorted((await client.call(m.WeightInfoArgs()))["asleep"])


async def wake(client: ServingClient, tags: Collection[str]) -> dict[str, Any]:
    """Wake those of the tags that sleep. A tag that does not sleep is no error."""
    sleeping = await asleep(client)
    found = tuple(tag for tag in tags if tag in sleeping)
    return await client.call(m.WakeArgs(tags=found)) if found else {"asleep": sleeping}
