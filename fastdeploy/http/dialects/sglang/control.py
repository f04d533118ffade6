"""SGLang's routes that pause, abort, clear caches and free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S, place_pause, read_lax, resume
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

# SGLang's names of a pause -> our (mode, clear_cache).
MODES = {"abort": ("abort", True), "retract": ("keep", True), "in_place": ("keep", False)}
# SGLang's names of memory -> our names. None: this server has no such memory.
TAGS = {"weights": "weight", "kv_cache": "kv_cache", "cuda_graph": None}


class PauseGenerationBody(LaxBody):
    mode: Literal["abort", "retract", "in_place"] | None = None


class AbortRequestBody(LaxBody):
    rid: str | list[str] = ""
    abort_all: bool = False


class MemoryBody(LaxBody):
    tags: list[str] | None = None


def add_control_routes(router: APIRouter, context: ServingContext) -> None:
    _add_generation_control(router, context)
    _add_memory(router, context)


def _add_generation_control(router: APIRouter, context: ServingContext) -> None:
    client, config = context.client, context.config

    @router.post("/pause_generation", openapi_extra=takes(PauseGenerationBody))
    async def pause_generation(request: Request) -> Response:
        """Answer when the engine is quiesced. Requests that arrive during the pause are held, whatever the mode."""
        body = await read_lax(request, PauseGenerationBody)
        mode, clear_cache = MODES[body.mode] if body.mode else (config.sglang_pause_mode, None)
        report = await place_pause(context, mode, clear_cache, placed_by="sglang")
        return json_response({"status": "ok", "message": "Generation paused successfully.", "report": report})

    @router.post("/continue_generation")
    async def continue_generation(request: Request) -> Response:
        await read_lax(request, LaxBody)
        report = await resume(context)
        return json_response({"status": "ok", "message": "Generation continued successfully.", "report": report})

    @router.post("/abort_request", openapi_extra=takes(AbortRequestBody))
    async def abort_request(request: Request) -> Response:
        body = await read_lax(request, AbortRequestBody)
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        if not body.abort_all and not all(rids or [""]):
            raise InvalidField("rid", "expected the rid of a request, or abort_all: true")
        args = m.AbortArgs(abort_all=True) if body.abort_all else m.AbortArgs(request_ids=rids)
        return json_response({"success": True, **await client.call(args)})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Drop the prefix cache. The call is never refused. Frozen requests of a paused engine give back their KV too,
        since a trainer that flushes during a pause is about to change the weights."""
        paused = (await client.call(m.PauseStatusArgs()))["is_paused"]
        result = await client.call(m.ResetCacheArgs(running=paused))
        return json_response({"message": "Cache flushed.", **result, "success": True})


def _add_memory(router: APIRouter, context: ServingContext) -> None:
    async def call(request: Request, args_for: Callable[[tuple[str, ...]], m.Args]) -> Response:
        tags = memory_tags((await read_lax(request, MemoryBody)).tags)
        result = {"asleep": []} if tags is None else await context.client.call(args_for(tags))
        return json_response({"success": True, **result})

    @router.post("/release_memory_occupation", openapi_extra=takes(MemoryBody))
    async def release_memory_occupation(request: Request) -> Response:
        return await call(request, lambda tags: m.SleepArgs(tags, mode="keep", timeout_s=PAUSE_TIMEOUT_S))

    @router.post("/resume_memory_occupation", openapi_extra=takes(MemoryBody))
    async def resume_memory_occupation(request: Request) -> Response:
        return await call(request, m.WakeArgs)


def memory_tags(tags: list[str] | None) -> tuple[str, ...] | None:
    """Return our names of these tags: () is all memory, None is none of it."""
    if not tags:
        return ()
    for tag in tags:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected some of {', '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(name for tag in tags if (name := TAGS[tag]) is not None)) or None
