"""SGLang's routes, as slime, AReaL and verl call them: pause, abort, caches, memory, adapters, and the state of this
server. Tokens and weights have files of their own."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION
from fastdeploy.http.body import LaxBody, parse_body
from fastdeploy.http.calls import Routes, catching, read_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import AdapterConfig, known_adapters, load_adapter, load_folder
from fastdeploy.http.control.protocol import LoraName
from fastdeploy.http.dialects.common import (
    PAUSE_TIMEOUT_S,
    add_absent_routes,
    memory_tags,
    model_fields,
    place_pause,
    resume,
    server_arguments,
    sglang_error,
)
from fastdeploy.http.dialects.sglang import generate, weights
from fastdeploy.http.dialects.sglang.tensor_upload import TensorUpload, decode_tensors, require_safetensors
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openapi import schema_of, takes
from fastdeploy.http.upload import admitted_upload, spooled_bytes
from fastdeploy.inter_communicator import messages as m

NO_GROUP = "this device has no process group for weights: use /update_weights_from_disk or /update_weights_from_tensor"
NO_IPC = "this device has no CUDA IPC handles: use /update_weights_from_disk or /update_weights_from_tensor"
NO_PROFILER = "this server has no profiler"
FROM_TENSORS = "__tensor__"  # the path that SGLang shows for an adapter that came without a folder
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


class NameBody(LaxBody):
    lora_name: LoraName


class LoadOptions(NameBody):
    """The options of a load. pinned: has no effect, since every adapter stays usable. upsert: false refuses a name that
    is loaded. SGLang does so without this field too. Here the adapter is replaced then, as on prime-rl's server, which
    has the same route and replaces one name in each step."""

    pinned: bool = False
    upsert: bool | None = None

    @property
    def replace(self) -> bool:
        return self.upsert is not False


class LoadBody(LoadOptions):
    lora_path: str = Field(min_length=1)


class ConfigBody(LoadOptions):
    """The fields of an upload but the tensors."""

    config_dict: AdapterConfig


class AdapterTensors(TensorUpload, kw_only=True):
    """The body of an upload.

    serialized_named_tensors: the bytes of one safetensors file, repeated for each tensor-parallel rank.
    serialized_tensors: these bytes alone, as older clients send them."""

    lora_name: Any = None
    config_dict: Any = None
    serialized_named_tensors: list[bytes] = []
    serialized_tensors: bytes | None = None
    pinned: Any = None
    upsert: Any = None
    added_tokens_config: dict[str, Any] | None = None
    expected_checksums: dict[str, Any] | None = None

    def tensors(self) -> bytes:
        """Return the bytes of the safetensors file. Raises InvalidField for anything else, or for several files."""
        field, entries = "serialized_named_tensors", self.serialized_named_tensors
        if self.serialized_tensors is not None:
            field, entries = "serialized_tensors", [self.serialized_tensors, *entries]
        if len(distinct := list(dict.fromkeys(entries))) != 1:
            raise InvalidField(field, f"expected one safetensors file, repeated for each rank; got {len(distinct)}")
        require_safetensors(distinct[0], field)
        return distinct[0]


def tensors_schema() -> dict[str, Any]:
    """Return the JSON schema of an upload."""
    schema, options = schema_of(AdapterTensors), schema_of(ConfigBody)
    properties = schema["properties"] | options["properties"]
    return schema | {"properties": properties, "required": options["required"]}


def parse_tensors(raw: bytes) -> tuple[ConfigBody, bytes]:
    """Return the options and the safetensors file of an upload. Raises InvalidField. Runs on a thread, since the body
    may have gigabytes."""
    body = decode_tensors(raw, AdapterTensors)
    for field in ("added_tokens_config", "expected_checksums"):
        if getattr(body, field):
            raise InvalidField(field, "not supported by this server")
    options = {name: getattr(body, name) for name in ConfigBody.model_fields}
    return parse_body(options, ConfigBody, {}), body.tensors()


def _add_adapters(router: APIRouter, context: ServingContext) -> None:
    routes, errors = Routes(router, read_body), sglang_error("error_message", loaded_adapters=None)

    async def loaded() -> dict[str, Any]:
        paths = {adapter["lora_name"]: adapter["path"] for adapter in await known_adapters(context)}
        return {"success": True, "error_message": "", "loaded_adapters": paths}

    @routes.post("/load_lora_adapter", LoadBody, errors=errors)
    async def load_lora_adapter(body: LoadBody) -> dict[str, Any]:
        """Load a PEFT folder. The folder is read before the answer, and not again later."""
        await load_folder(context, body.lora_name, body.lora_path, replace=body.replace)
        return await loaded()

    @routes.post("/unload_lora_adapter", NameBody, errors=errors)
    async def unload_lora_adapter(body: NameBody) -> dict[str, Any]:
        """Remove the name. Running requests of the adapter finish."""
        await context.client.call(m.UnloadAdapterArgs(body.lora_name))
        return await loaded()

    @router.post("/load_lora_adapter_from_tensors", openapi_extra=takes(tensors_schema()))
    @catching(errors)
    async def load_lora_adapter_from_tensors(request: Request) -> Response:
        """Load the bytes of a safetensors file. A pickle is refused by its first bytes, and never loaded."""
        async with admitted_upload(context, None):
            body, tensors = await asyncio.to_thread(parse_tensors, await request.body())
            async with spooled_bytes(tensors, context) as source:
                args = m.LoadAdapterArgs(body.lora_name, source, body.config_dict, FROM_TENSORS, replace=body.replace)
                await load_adapter(context, args)
        return json_response(await loaded())


def sglang_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    generate.add_routes(router, context)
    _add_control(router, context)
    _add_info(router, context)
    weights.add_routes(router, context)
    _add_adapters(router, context)
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
