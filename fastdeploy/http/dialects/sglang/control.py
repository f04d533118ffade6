"""SGLang's control and information routes. They translate to the engine's calls and hold no state."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy import __version__
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import parse_body, parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S, LaxBody, place_pause, resume
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

# SGLang's names of a pause, and what they are here: (mode, clear_cache).
MODES = {"abort": ("abort", True), "retract": ("keep", True), "in_place": ("keep", False)}
# Memory that SGLang names and that is ours under another name, or that does not exist here.
TAGS = {"weights": "weight", "kv_cache": "kv_cache", "cuda_graph": None}


class PauseGenerationBody(LaxBody):
    mode: Literal["abort", "retract", "in_place"] | None = None


class AbortRequestBody(LaxBody):
    rid: str | list[str] = ""
    abort_all: bool = False


class MemoryBody(LaxBody):
    tags: list[str] | None = None


async def read_lax(request: Request, kind: type[LaxBody]) -> Any:
    """The body as ``kind``, null being absent; fields that it does not know are dropped."""
    data = parse_json(await request.body())
    return parse_body({k: v for k, v in data.items() if k in kind.model_fields}, kind, {})


def add_control_routes(router: APIRouter, context: ServingContext) -> None:
    _add_generation_control(router, context)
    _add_memory(router, context)
    _add_information(router, context)


def _add_generation_control(router: APIRouter, context: ServingContext) -> None:
    client, config = context.client, context.config

    @router.post("/pause_generation", openapi_extra=takes(PauseGenerationBody))
    async def pause_generation(request: Request) -> Response:
        """Answers when quiesced. Requests that come while it stands are held, whatever the mode."""
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
        result = await client.call(args)
        return json_response({"success": True, **result})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Drop the prefix cache; never refused. In a paused engine the frozen requests give their KV back too, since a
        trainer that flushes then is about to change the weights."""
        paused = (await client.call(m.PauseStatusArgs()))["is_paused"]
        result = await client.call(m.ResetCacheArgs(running=paused))
        return json_response({"message": "Cache flushed.", **result, "success": True})


def _add_memory(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    @router.post("/release_memory_occupation", openapi_extra=takes(MemoryBody))
    async def release_memory_occupation(request: Request) -> Response:
        tags = memory_tags((await read_lax(request, MemoryBody)).tags)
        if tags is None:
            return json_response({"success": True, "asleep": []})
        args = m.SleepArgs(tags=tags, mode="keep", timeout_s=PAUSE_TIMEOUT_S)
        return json_response({"success": True, **await client.call(args)})

    @router.post("/resume_memory_occupation", openapi_extra=takes(MemoryBody))
    async def resume_memory_occupation(request: Request) -> Response:
        tags = memory_tags((await read_lax(request, MemoryBody)).tags)
        if tags is None:
            return json_response({"success": True, "asleep": []})
        return json_response({"success": True, **await client.call(m.WakeArgs(tags=tags))})


def memory_tags(tags: list[str] | None) -> tuple[str, ...] | None:
    """Our names of these tags; () is all memory, None is none of it."""
    if not tags:
        return ()
    for tag in tags:
        if tag not in TAGS:
            raise InvalidField("tags", f"expected some of {', '.join(TAGS)}, got {tag!r}")
    return tuple(dict.fromkeys(TAGS[tag] for tag in tags if TAGS[tag] is not None)) or None


def _add_information(router: APIRouter, context: ServingContext) -> None:
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
    async def loads() -> Response:
        """Frozen requests count as running, held ones as waiting."""
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": __version__, "loads": [await load()]})

    @router.get("/get_load")
    async def get_load() -> Response:
        return json_response([await load()])

    @router.get("/get_weight_version")
    async def get_weight_version() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response(
            {"weight_version": info["version"], "weight_epoch": info["weight_epoch"], "boot_id": info["boot_id"]}
        )

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """As /health: it generates nothing, since a paused engine is healthy."""
        await client.require_engine()
        return json_response({"status": "ok"})

    @router.get("/model_info")
    async def model_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({**model_fields(context), "weight_version": info["version"]})

    @router.get("/get_model_info")
    async def get_model_info() -> Response:
        return await model_info()

    @router.get("/get_server_info")
    async def get_server_info(request: Request) -> Response:
        return json_response(await server_arguments(context, request))


def model_fields(context: ServingContext) -> dict[str, Any]:
    config = context.config
    return {
        "model_path": config.model,
        "served_model_name": config.served_model_name,
        "tokenizer_path": config.model if context.tokenizer is not None else None,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


async def server_arguments(context: ServingContext, request: Request) -> dict[str, Any]:
    """Content of SGLang's /server_info: the shape of the deployment and the server's arguments. One replica on one
    device is tp, pp, ep and dp of 1."""
    client, config = context.client, context.config
    host, port = request.scope.get("server") or (config.host, config.port)
    info = await client.call(m.WeightInfoArgs())
    return {
        **msgspec.to_builtins(config),
        **client.model_info,
        **model_fields(context),
        "host": host,
        "port": port,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "num_gpus": 1,
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "disaggregation_mode": "null",
        # slime compares these with its own settings before it takes an engine that it has not started.
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "weight_version": info["version"],
        "version": __version__,
        "time": time.time(),
    }
