"""SkyRL's own routes beside vLLM's: /collective_rpc with its method names, adapters, the router's /finish_session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.entrypoints.dialects.common import LaxBody, adapters_off, read_control
from fastdeploy.entrypoints.dialects.vllm_weights import (
    FinishBody,
    StartBody,
    VllmWeights,
    check_init,
    parse_update_info,
)
from fastdeploy.entrypoints.openai.context import ServingContext
from fastdeploy.entrypoints.openai.errors import json_response
from fastdeploy.entrypoints.openai.protocol import parse_body
from fastdeploy.entrypoints.openapi import takes
from fastdeploy.errors import InvalidField

Method = Callable[[dict[str, Any]], Awaitable[Any]]


class RpcBody(LaxBody):
    """Workers are called by keywords here; SkyRL's client does nothing else."""

    method: str
    args: list[Any] = Field([], max_length=0)
    kwargs: dict[str, Any] = {}


class AdapterBody(LaxBody):
    lora_name: str = Field(min_length=1)


class SessionBody(LaxBody):
    session_id: int | str


def skyrl_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    _add_rpc(router, worker_methods(VllmWeights(context)))
    _add_adapters(router)

    @router.post("/finish_session", openapi_extra=takes(SessionBody, query=True))
    async def finish_session(request: Request) -> Response:
        """For routers, which tie a session to a replica. Here is one replica, so that nothing is to be released; 0 is
        a session like any other."""
        body = await read_control(request, SessionBody)
        return json_response({"status": "ok", "session_id": body.session_id})

    return router


def worker_methods(weights: VllmWeights) -> dict[str, Method]:
    """What SkyRL calls on vLLM's workers, by every name that it has had."""

    async def init(kwargs: dict[str, Any]) -> None:
        check_init(kwargs.get("init_info"))

    async def start(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await weights.start(parse_body(kwargs, StartBody, {}))

    async def update(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await weights.add(parse_update_info(kwargs.get("update_info")))

    async def finish(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await weights.finish(parse_body(kwargs, FinishBody, {}).weight_version)

    names = {
        init: ("init_weight_transfer_engine", "init_weight_transfer_engine_rdt"),
        start: ("skyrl_start_weight_update", "start_weight_update"),
        update: ("update_weights", "update_weights_disk", "update_weights_ipc", "update_weights_nccl",
                 "update_weights_rdt", "update_weights_chunk"),
        finish: ("skyrl_finish_weight_update", "finish_weight_update"),
    }  # fmt: skip
    return {name: method for method, aliases in names.items() for name in aliases}


def _add_rpc(router: APIRouter, methods: dict[str, Method]) -> None:
    @router.post("/collective_rpc", openapi_extra=takes(RpcBody, query=True))
    async def collective_rpc(request: Request) -> Response:
        body = await read_control(request, RpcBody)
        if body.method not in methods:
            raise InvalidField("method", f"{body.method!r} is none of {', '.join(sorted(methods))}")
        return json_response({"results": [await methods[body.method](body.kwargs)]})


def _add_adapters(router: APIRouter) -> None:
    @router.post("/skyrl/v1/load_lora_adapter")
    async def load_lora_adapter() -> Response:
        raise adapters_off()

    @router.post("/skyrl/v1/abort_lora_requests", openapi_extra=takes(AdapterBody, query=True))
    async def abort_lora_requests(request: Request) -> Response:
        """No request runs on an adapter here, so that there is none to abort."""
        await read_control(request, AdapterBody)
        return json_response({"status": "ok", "aborted": [], "count": 0})

    @router.post("/skyrl/v1/generate")
    async def generate() -> Response:
        raise InvalidField("return_routed_experts", "not supported by this server: use /inference/v1/generate")
