"""vLLM's routes, as SkyRL, TRL and AReaL call them: pause, abort, caches, memory, adapters, and the description of the
server. Tokens and weights have files of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import PlainTextResponse, Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import STATUS, AdapterFolderNotFound, AdapterLoaded, FastDeployError, InvalidField
from fastdeploy.http.body import Body, LaxBody
from fastdeploy.http.calls import Routes, read_body, read_lenient
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import load_folder
from fastdeploy.http.control.protocol import Kv, LoraName, PauseMode, Version
from fastdeploy.http.dialects.common import (
    PAUSE_TIMEOUT_S,
    memory_tags,
    place_pause,
    resume,
    server_arguments,
    sglang_error,
    success,
)
from fastdeploy.http.dialects.vllm import generate, weights
from fastdeploy.http.errors import error_body, error_response, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openapi import asks
from fastdeploy.inter_communicator import messages as m

# vLLM's names of memory -> our names.
TAGS = {"weights": "weight", "kv_cache": "kv_cache", "weight": "weight"}
EVERYTHING = ("weight", "kv_cache")


def vllm_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    _add_adapters(router, context)
    _add_pause_and_abort(router, context)
    _add_memory(router, context)
    generate.add_routes(router, context)
    _add_server(router, context)
    _add_weight_labels(router, context)
    generate.add_text_routes(router, context)
    weights.add_routes(router, context)
    return router


# ------------------------------------------------------------------ adapters: the answers are texts


class LoadBody(LaxBody):
    """The fields of a load. load_inplace: true replaces an adapter that is loaded. version and kv are fields of our
    own."""

    lora_name: LoraName
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False
    version: Version | None = None
    kv: Kv = "keep"


class UnloadBody(LaxBody):
    lora_name: LoraName


def _add_adapters(router: APIRouter, context: ServingContext) -> None:
    routes = Routes(router, read_body, PlainTextResponse)

    @routes.post("/v1/load_lora_adapter", LoadBody, errors=_adapter_error)
    async def load_lora_adapter(body: LoadBody) -> str:
        """Load a PEFT folder. The folder is read before the answer, and not again later."""
        options = {"version": body.version, "kv": body.kv, "replace": body.load_inplace}
        await load_folder(context, body.lora_name, body.lora_path, **options)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @routes.post("/v1/unload_lora_adapter", UnloadBody, errors=_adapter_error)
    async def unload_lora_adapter(body: UnloadBody) -> str:
        """Remove the name. Running requests of the adapter finish."""
        await context.client.call(m.UnloadAdapterArgs(body.lora_name))
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _adapter_error(error: FastDeployError) -> Response:
    """Return an error with the type that vLLM gives it. Its code is that of all routes, and so is its status, but for a
    folder without an adapter: TRL takes a 404 of the load for a server that has no such route."""
    status = 400 if isinstance(error, AdapterFolderNotFound) else STATUS.get(error.code, 500)
    if status not in (400, 404):
        return error_response(error)
    body = error_body(error)
    body["error"]["type"] = "NotFoundError" if status == 404 else "BadRequestError"
    if isinstance(error, InvalidField | AdapterLoaded):
        body["error"]["type"] = "InvalidUserInput"
    return json_response(body, status)


# ------------------------------------------------------------------ pause, abort and caches


class PauseBody(LaxBody):
    """The fields of a pause. clear_cache: vLLM's default is true in every mode. After a pause with mode keep, the
    frozen requests are then recomputed, which TRL relies on. wait_for_inflight_requests: an older form of mode=wait."""

    mode: PauseMode | None = None
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False


class AbortBody(Body):
    """The requests to abort: no ids, or an empty list, means every request. Unknown fields are refused, so that a
    misspelled field name does not abort every request."""

    request_ids: list[str] = []


class AbortTheseBody(Body):
    request_ids: list[str]


class ResetBody(LaxBody):
    reset_running_requests: bool = False


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
    @RouteAccess.DATA
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


# ------------------------------------------------------------------ memory


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TagsBody(LaxBody):
    """The kinds of memory; no tags means all of it."""

    tags: Annotated[list[str], BeforeValidator(_as_list)] = []


class SleepBody(TagsBody):
    """The fields of a sleep. level: 1 keeps the weights outside of the engine's memory. 2 drops the weights, which must
    be published again. mode: mode of the pause that a sleep implies."""

    level: int = 1
    mode: PauseMode | None = None


def _add_memory(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)
    falling_asleep = asyncio.Lock()

    @routes.post("/sleep", SleepBody)
    async def sleep(body: SleepBody) -> dict[str, Any]:
        if body.level not in (1, 2):
            raise InvalidField("level", f"expected 1 or 2, got {body.level}")
        async with falling_asleep:  # a second call of the same time finds what the first has done
            sleeping = await asleep(client)
            tags = tuple(tag for tag in memory_tags(body.tags, TAGS) or EVERYTHING if tag not in sleeping)
            if not tags:
                return {"status": "sleeping", "asleep": sleeping}
            mode, discard = body.mode or context.config.vllm_pause_mode, body.level == 2 and "weight" in tags
            args = m.SleepArgs(tags=tags, mode=mode, discard=discard, timeout_s=PAUSE_TIMEOUT_S)
            return {"status": "sleeping", **await client.call(args)}

    @routes.post("/wake_up", TagsBody)
    async def wake_up(body: TagsBody) -> dict[str, Any]:
        return {"status": "awake", **await wake(client, memory_tags(body.tags, TAGS) or EVERYTHING)}

    @router.get("/is_sleeping")
    @RouteAccess.DATA
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


# ------------------------------------------------------------------ the server and the labels of its weights


class InfoBody(LaxBody):
    config_format: Literal["text", "json"] = "text"


class VersionBody(LaxBody):
    """The new label. SGLang's clients send abort_all_requests too. A new label aborts nothing, whatever that field
    says."""

    new_version: Version


class CheckBody(LaxBody):
    action: str
    baseline: dict[str, str] | None = None


def _add_server(router: APIRouter, context: ServingContext) -> None:
    @router.get("/get_world_size")
    @RouteAccess.DATA
    async def get_world_size() -> Response:
        """Answer 1: one replica on one device, whatever include_dp says."""
        return json_response({"world_size": 1})

    @router.get("/server_info", openapi_extra=asks(InfoBody))
    @RouteAccess.DATA
    async def server_info(request: Request) -> Response:
        """Answer with SGLang's fields at the top level, and vLLM's below vllm_config."""
        body = await read_lenient(request, InfoBody)
        arguments = await server_arguments(context, request)
        config: Any = vllm_config(context)
        if body.config_format == "text":
            config = msgspec.json.encode(config).decode()
        return json_response({**arguments, "world_size": 1, "vllm_config": config})


def vllm_config(context: ServingContext) -> dict[str, Any]:
    """Return the part of vLLM's resolved configuration that has a meaning here. weight_transfer_config is null: this
    device has neither NCCL nor CUDA IPC, and clients that need one of them look at this field first."""
    config, info = context.config, context.client.model_info
    return {
        "model_config": {
            "model": config.model,
            "served_model_name": config.served_model_name,
            "tokenizer": config.model if context.tokenizer is not None else None,
            "dtype": f"torch.{info.get('dtype', 'float32')}",
            "quantization": info.get("quantization"),
            "max_model_len": context.max_model_len,
            "logprobs_mode": config.logprobs_mode,
        },
        "cache_config": {"block_size": info.get("block_size"), "num_gpu_blocks": info.get("num_blocks")},
        "parallel_config": {
            "world_size": 1,
            "world_size_across_dp": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "lora_config": {
            "max_lora_rank": info.get("max_lora_rank"),
            # Any number of adapters stays usable. So this is the number of requests, each of which may name another.
            "max_loras": info.get("max_waiting"),
            "max_cpu_loras": None,
            "fully_sharded_loras": False,
            "lora_dtype": "auto",
        },
        "weight_transfer_config": None,
    }


def _add_weight_labels(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)

    @routes.post("/update_weight_version", VersionBody, errors=sglang_error())
    async def update_weight_version(body: VersionBody) -> dict[str, Any]:
        """Relabel the weights that serve. Later tokens carry the new label, and no request is disturbed."""
        version = body.new_version
        await client.call(m.SetVersionArgs(version))
        return success(f"later tokens are labelled {version}", new_version=version, weight_version=version)

    @router.get("/weight_info")
    @RouteAccess.DATA
    async def weight_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({"weight_version": info["version"], **info})

    @routes.post("/weight_checker", CheckBody)
    async def weight_checker(body: CheckBody) -> dict[str, Any]:
        """Answer "checksum" with the SHA-256 of every tensor that serves. Answer "compare" with the names that differ
        from ``baseline``, the caller's own checksums. A name that only one side has counts as different."""
        if body.action not in ("checksum", "compare"):
            raise InvalidField("action", f"expected checksum or compare, got {body.action!r}")
        baseline = body.baseline if body.action == "compare" else {}
        if baseline is None:
            raise InvalidField("baseline", "expected an object of checksums to compare with")
        checksums = (await client.call(m.WeightInfoArgs(checksums=True)))["checksums"]
        if body.action == "checksum":
            return {"checksums": checksums}
        mismatches = sorted({name for name, _ in checksums.items() ^ baseline.items()})
        return {"match": not mismatches, "mismatches": mismatches}
