"""vLLM's routes about the server and the weights that serve."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Version
from fastdeploy.http.dialects.common import Routes, read_control, server_arguments, success
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import asks
from fastdeploy.inter_communicator import messages as m


class InfoBody(LaxBody):
    config_format: Literal["text", "json"] = "text"


class VersionBody(LaxBody):
    """SGLang's clients send abort_all_requests too. A new label aborts nothing, whatever that field says."""

    new_version: Version


class CheckBody(LaxBody):
    action: str
    baseline: dict[str, str] | None = None


def add_routes(router: APIRouter, context: ServingContext) -> None:
    _add_server(router, context)
    _add_weights(router, context)


def _add_server(router: APIRouter, context: ServingContext) -> None:
    @router.get("/get_world_size")
    async def get_world_size() -> Response:
        """Answer 1: one replica on one device, whatever include_dp says."""
        return json_response({"world_size": 1})

    @router.get("/server_info", openapi_extra=asks(InfoBody))
    async def server_info(request: Request) -> Response:
        """Answer with SGLang's fields at the top level, and vLLM's below vllm_config."""
        body = await read_control(request, InfoBody)
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


def _add_weights(router: APIRouter, context: ServingContext) -> None:
    client = context.client

    @Routes(router, sglang_errors=True).post("/update_weight_version", VersionBody)
    async def update_weight_version(body: VersionBody) -> dict[str, Any]:
        """Relabel the weights that serve. Later tokens carry the new label, and no request is disturbed."""
        version = body.new_version
        await client.call(m.SetVersionArgs(version))
        return success(f"later tokens are labelled {version}", new_version=version, weight_version=version)

    @router.get("/weight_info")
    async def weight_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({"weight_version": info["version"], **info})

    @Routes(router).post("/weight_checker", CheckBody)
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
