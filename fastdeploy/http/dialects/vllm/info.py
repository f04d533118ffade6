"""What vLLM's clients ask about the server and its weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Version
from fastdeploy.http.dialects.common import LaxBody, adapters_off, read_control
from fastdeploy.http.dialects.sglang.control import server_arguments
from fastdeploy.http.dialects.sglang.weights import sglang_shape
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import asks, takes
from fastdeploy.inter_communicator import messages as m


class InfoBody(LaxBody):
    config_format: Literal["text", "json"] = "text"


class VersionBody(LaxBody):
    """SGLang's clients send abort_all_requests too. Naming a version aborts nothing, whatever it says."""

    new_version: Version


class CheckBody(LaxBody):
    action: str
    baseline: dict[str, str] | None = None


def add_information_routes(router: APIRouter, context: ServingContext) -> None:
    _add_server(router, context)
    _add_version(router, context)
    _add_checker(router, context)


def _add_server(router: APIRouter, context: ServingContext) -> None:
    @router.get("/get_world_size")
    async def get_world_size() -> Response:
        """One replica on one device, whatever include_dp says."""
        return json_response({"world_size": 1})

    @router.get("/server_info", openapi_extra=asks(InfoBody))
    async def server_info(request: Request) -> Response:
        """SGLang's fields at the top level, vLLM's below vllm_config."""
        body = await read_control(request, InfoBody)
        arguments = await server_arguments(context, request)
        config: Any = vllm_config(context)
        if body.config_format == "text":
            config = msgspec.json.encode(config).decode()
        return json_response({**arguments, "world_size": 1, "vllm_config": config})

    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        router.post(path)(_no_adapters)


async def _no_adapters() -> Response:
    raise adapters_off()


def vllm_config(context: ServingContext) -> dict[str, Any]:
    """The part of vLLM's resolved configuration that has a meaning here. weight_transfer_config: NCCL and CUDA IPC do
    not exist on this device, and clients that need them look here first."""
    config, info = context.config, context.client.model_info
    return {
        "model_config": {
            "model": config.model,
            "served_model_name": config.served_model_name,
            "tokenizer": config.model if context.tokenizer is not None else None,
            "dtype": f"torch.{info.get('dtype', 'float32')}",
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
        "lora_config": None,
        "weight_transfer_config": None,
    }


def _add_version(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    @router.post("/update_weight_version", openapi_extra=takes(VersionBody, query=True))
    @sglang_shape()
    async def update_weight_version(request: Request) -> Response:
        """Relabels later tokens; nothing in flight is touched."""
        version = (await read_control(request, VersionBody)).new_version
        await client.call(m.SetVersionArgs(version))
        message = f"later tokens are labelled {version}"
        return json_response({"success": True, "message": message, "new_version": version, "weight_version": version})

    @router.get("/weight_info")
    async def weight_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({"weight_version": info["version"], **info})


def _add_checker(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    @router.post("/weight_checker", openapi_extra=takes(CheckBody, query=True))
    async def weight_checker(request: Request) -> Response:
        """checksum: SHA-256 of every tensor that serves. compare: the names that differ from ``baseline``, which the
        caller keeps; a name that only one of the two has differs."""
        body = await read_control(request, CheckBody)
        if body.action not in ("checksum", "compare"):
            raise InvalidField("action", f"expected checksum or compare, got {body.action!r}")
        if body.action == "compare" and body.baseline is None:
            raise InvalidField("baseline", "expected an object of checksums to compare with")
        info = await client.call(m.WeightInfoArgs(checksums=True))
        checksums = info["checksums"]
        if body.action == "checksum":
            return json_response({"checksums": checksums})
        names = sorted(checksums.keys() | body.baseline.keys())
        mismatches = [name for name in names if checksums.get(name) != body.baseline.get(name)]
        return json_response({"match": not mismatches, "mismatches": mismatches})
