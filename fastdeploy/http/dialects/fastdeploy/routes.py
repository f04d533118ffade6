"""FastDeploy's routes that no other caller has. Its other routes are the native ones."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import STATUS, FastDeployError
from fastdeploy.core.process import VERSION, is_secret
from fastdeploy.http.calls import catching
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.operation import health_of
from fastdeploy.http.dialects.common import add_absent_routes
from fastdeploy.http.dialects.fastdeploy.weights import FolderWeights
from fastdeploy.http.errors import error_body, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m

RANKS = {"dp_rank": 0, "local_dp_rank": 0}
NO_POOLING = "this server has no pooling models: it answers /v1/completions and /v1/chat/completions"
NO_EXPERTS = "this server does not move experts between devices: nothing needs to be rearranged"
NOT_HERE = {
    "/v1/reward": f"{NO_POOLING}; /v1/completions with echo and max_tokens 0 scores a text by its log probabilities",
    "/v1/embeddings": NO_POOLING,
}
ABSENT = {
    "/rearrange_experts": NO_EXPERTS,
    "/get_per_expert_tokens_stats": NO_EXPERTS,
    "/check_redundant": NO_EXPERTS,
    "/controller/reset_scheduler": "use POST /v1/reset, which aborts all requests and clears the KV cache",
    "/controller/scheduler": "use POST /v1/reset in place of reset; there are no shards of a scheduler here",
}


def fastdeploy_router(context: ServingContext, weights: FolderWeights) -> APIRouter:
    router = APIRouter()
    client = context.client

    @router.get("/ping")
    @router.post("/ping")
    @RouteAccess.OPEN
    async def ping() -> Response:
        """Answer as /health does."""
        return health_of(client)

    @router.get("/load")
    @RouteAccess.DATA
    async def list_routes(request: Request) -> Response:
        """List the routes whose paths begin with /v1."""
        return json_response({"routes": routes_below(request, "/v1")})

    @router.get("/config-info")
    @RouteAccess.DATA
    async def config_info() -> Response:
        """Answer the settings of this server, in FastDeploy's groups."""
        return json_response(await settings(context))

    async def change(call: Callable[[], Awaitable[Any]], done: str, nothing: str) -> Response:
        report = await call()
        return json_response({**RANKS, "msg": nothing if report is None else done, "report": report})

    @router.get("/clear_load_weight")
    @catching(failure)
    async def clear_load_weight(request: Request) -> Response:
        """End all requests, and give the memory of the weights and of the KV cache back. Until /update_model_weight,
        requests are refused."""
        return await change(weights.clear, "clear model weight successfully", "model weight is cleared")

    @router.get("/update_model_weight")
    @catching(failure)
    async def update_model_weight(request: Request) -> Response:
        """Load the weights that are in the folder of the model now, and serve again."""
        return await change(weights.load, "update model weight successfully", "model weight is updated")

    add_absent_routes(router, NOT_HERE, access=RouteAccess.DATA)
    add_absent_routes(router, ABSENT)
    return router


def failure(error: FastDeployError) -> Response:
    """Return the answer to a call that failed, with FastDeploy's ``msg``. A call beside another one is a 400, as
    there."""
    status = STATUS.get(error.code, 500)
    return json_response({**RANKS, "msg": error.message, **error_body(error)}, 400 if status == 409 else status)


def routes_below(request: Request, start: str) -> list[dict[str, Any]]:
    """Return the path, the methods and the tags of each route whose path begins with ``start``."""
    return [
        {
            "path": path,
            "methods": sorted(method.upper() for method in operations),
            "tags": next(iter(operations.values())).get("tags", []),
        }
        for path, operations in request.app.openapi()["paths"].items()
        if path.startswith(start)
    ]


async def settings(context: ServingContext) -> dict[str, Any]:
    """Return the content of /config-info. Only variables of the environment that begin with FD_ are shown."""
    config, info = context.config, context.client.model_info
    welcome = await context.client.require_engine()
    return {
        "model_config": {
            "model": config.model,
            "max_model_len": welcome.max_model_len,
            **await context.client.call(m.ModelInfoArgs()),
        },
        "cache_config": {name: info.get(name) for name in ("block_size", "num_blocks")},
        "scheduler_config": {"max_num_seqs": info.get("max_num_seqs")},
        "parallel_config": dict.fromkeys(
            ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size", "pipeline_parallel_size"), 1
        ),
        "load_config": {"dynamic_load_weight": True},
        "server_config": msgspec.to_builtins(config),
        "chat_template": context.tokenizer.template if context.tokenizer is not None else None,
        "device_info": {"device_type": "cpu", "device_count": os.cpu_count()},
        "env_config": {
            name: value for name, value in os.environ.items() if name.startswith("FD_") and not is_secret(name)
        },
        "version_info": {"version": VERSION},
    }
