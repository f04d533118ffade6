"""SGLang's routes, as slime, AReaL and verl call them: pause, abort, caches, memory, and the state of this server.
Tokens, weights and adapters have files of their own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION
from fastdeploy.http.body import LaxBody
from fastdeploy.http.calls import Routes, read_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import (
    PAUSE_TIMEOUT_S,
    add_absent_routes,
    memory_tags,
    model_fields,
    place_pause,
    resume,
    server_arguments,
)
from fastdeploy.http.dialects.sglang import adapters, generate, weights
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m

NO_GROUP = "this device has no process group for weights: use /update_weights_from_disk or /update_weights_from_tensor"
NO_IPC = "this device has no CUDA IPC handles: use /update_weights_from_disk or /update_weights_from_tensor"
NO_PROFILER = "this server has no profiler"
# SGLang's routes for which this device, or this server, has nothing.
ABSENT = {
    "/init_weights_update_group": NO_GROUP,
    "/update_weights_from_distributed": NO_GROUP,
    "/destroy_weights_update_group": NO_GROUP,
    "/update_weights_from_ipc": NO_IPC,
    "/start_profile": NO_PROFILER,
    "/stop_profile": NO_PROFILER,
}
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
    """The kinds of memory; no tags means all of it."""

    tags: list[str] = []

    def ours(self) -> tuple[str, ...]:
        """Return our names of the tags. () is all memory, if it is not that the tags name nothing of this server."""
        return memory_tags(self.tags, TAGS)

    @property
    def names_nothing_here(self) -> bool:
        return bool(self.tags) and not self.ours()


def sglang_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    generate.add_routes(router, context)
    _add_control(router, context)
    _add_info(router, context)
    weights.add_routes(router, context)
    adapters.add_routes(router, context)
    add_absent_routes(router, ABSENT, reason_field="error_message")
    return router


def _add_control(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router, read_body)

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
        args = m.SleepArgs(body.ours(), mode="keep", timeout_s=PAUSE_TIMEOUT_S)
        return {"success": True, **({"asleep": []} if body.names_nothing_here else await client.call(args))}

    @routes.post("/resume_memory_occupation", MemoryBody)
    async def resume_memory_occupation(body: MemoryBody) -> dict[str, Any]:
        args = m.WakeArgs(body.ours())
        return {"success": True, **({"asleep": []} if body.names_nothing_here else await client.call(args))}


def _add_info(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    async def load() -> dict[str, int]:
        counts = (await client.call(m.PauseStatusArgs()))["counts"]
        running, waiting = counts["running"] + counts["frozen"], counts["queued"]
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_reqs": running + waiting,
            "num_total_reqs": running + waiting,
        }

    @router.get("/v1/loads")
    @RouteAccess.DATA
    async def loads() -> Response:
        """Count frozen requests as running, and held requests as waiting."""
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": VERSION, "loads": [await load()]})

    @router.get("/get_load")
    @RouteAccess.DATA
    async def get_load() -> Response:
        return json_response([await load()])

    @router.get("/get_weight_version")
    @RouteAccess.DATA
    async def get_weight_version() -> Response:
        info = await client.call(m.WeightInfoArgs())
        fields = {name: info[name] for name in ("weight_epoch", "boot_id")}
        return json_response({"weight_version": info["version"], **fields})

    @router.get("/health_generate")
    @RouteAccess.OPEN
    async def health_generate() -> Response:
        """Answer 200 while an engine is connected, else 503. No token is generated: a paused engine is healthy."""
        await client.require_engine()
        return json_response({"status": "ok"})

    @router.get("/get_model_info")
    @router.get("/model_info")
    @RouteAccess.DATA
    async def model_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({**model_fields(context), "weight_version": info["version"]})

    @router.get("/get_server_info")
    @RouteAccess.DATA
    async def get_server_info(request: Request) -> Response:
        """Answer as /server_info, without vLLM's fields."""
        return json_response(await server_arguments(context, request))
