"""SGLang's routes that pause, abort, clear caches and free memory."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S, Routes, place_pause, resume
from fastdeploy.http.errors import json_response
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


def add_routes(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router, query=False)

    @routes.post("/pause_generation", PauseGenerationBody)
    async def pause_generation(body: PauseGenerationBody) -> dict[str, Any]:
        """Answer when the engine is quiesced. Requests that arrive during the pause are held, whatever the mode."""
        mode, clear_cache = MODES[body.mode] if body.mode else (context.config.sglang_pause_mode, None)
        report = await place_pause(client, mode, clear_cache, "sglang", context.config.dialect_hold_ttl_s)
        return {"status": "ok", "message": "Generation paused successfully.", "report": report}

    @routes.post("/continue_generation", LaxBody)
    async def continue_generation(_: LaxBody) -> dict[str, Any]:
        return {"status": "ok", "message": "Generation continued successfully.", "report": await resume(client)}

    @routes.post("/abort_request", AbortRequestBody)
    async def abort_request(body: AbortRequestBody) -> dict[str, Any]:
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        if not body.abort_all and not all(rids or [""]):
            raise InvalidField("rid", "expected the rid of a request, or abort_all: true")
        args = m.AbortArgs(abort_all=True) if body.abort_all else m.AbortArgs(request_ids=rids)
        return {"success": True, **await client.call(args)}

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Drop the prefix cache. The call is never refused. Frozen requests of a paused engine give back their KV too,
        since a trainer that flushes during a pause is about to change the weights."""
        paused = (await client.call(m.PauseStatusArgs()))["is_paused"]
        result = await client.call(m.ResetCacheArgs(running=paused))
        return json_response({"message": "Cache flushed.", **result, "success": True})

    @routes.post("/release_memory_occupation", MemoryBody)
    async def release_memory_occupation(body: MemoryBody) -> dict[str, Any]:
        tags = memory_tags(body.tags)
        if tags is None:
            return {"success": True, "asleep": []}
        args = m.SleepArgs(tags, mode="keep", timeout_s=PAUSE_TIMEOUT_S)
        return {"success": True, **await client.call(args)}

    @routes.post("/resume_memory_occupation", MemoryBody)
    async def resume_memory_occupation(body: MemoryBody) -> dict[str, Any]:
        tags = memory_tags(body.tags)
        return {"success": True, **({"asleep": []} if tags is None else await client.call(m.WakeArgs(tags)))}


def memory_tags(tags: list[str] | None) -> tuple[str, ...] | None:
    """Return our names of these tags: () is all memory, None is none of it."""
    if not tags:
        return ()
    for tag in tags:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected some of {', '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(name for tag in tags if (name := TAGS[tag]) is not None)) or None
