"""SkyRL's routes. SkyRL uses vLLM's routes, and these: /collective_rpc with methods of its
workers, /fetch_weights, adapters, and /finish_session of its router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import Body, LaxBody, parse_body
from fastdeploy.http.calls import Routes
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import load_folder
from fastdeploy.http.control.protocol import LoraName
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S
from fastdeploy.http.dialects.skyrl import generate
from fastdeploy.http.dialects.skyrl.deltas import CheckpointDeltas, FetchBody
from fastdeploy.http.dialects.vllm.routes import TAGS, wake
from fastdeploy.http.dialects.vllm.weights import (
    FinishBody,
    StartBody,
    WeightUpdates,
)
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m

Method = Callable[[dict[str, Any]], Awaitable[Any]]


class RpcBody(LaxBody):
    """A call of a worker's method by keywords, as SkyRL's client sends it."""

    method: str
    args: list[Any] = Field([], max_length=0)
    kwargs: dict[str, Any] = {}


class SleepBody(Body):
    """The fields of a sleep. offload_kv: keep the KV of frozen requests. Otherwise their KV is computed again after the
    wake-up."""

    offload_kv: bool = True


class WakeBody(Body):
    tags: list[Literal["weights", "kv_cache"]] = Field(min_length=1)


class AdapterBody(LaxBody):
    lora_name: LoraName


class LoadBody(AdapterBody):
    lora_path: str = Field(min_length=1)


class SessionBody(LaxBody):
    session_id: int | str


def skyrl_router(context: ServingContext) -> APIRouter:
    router = APIRouter()
    deltas = CheckpointDeltas(context.config)
    weights = WeightUpdates(context.client, deltas)
    routes, methods = Routes(router), worker_methods(weights) | memory_methods(context)
    generate.add_routes(router, context)

    @routes.post("/collective_rpc", RpcBody)
    async def collective_rpc(body: RpcBody) -> dict[str, Any]:
        if body.method not in methods:
            raise InvalidField("method", f"{body.method!r} is none of {', '.join(sorted(methods))}")
        return {"results": [await methods[body.method](body.kwargs)]}

    @routes.post("/skyrl/v1/load_lora_adapter", LoadBody)
    async def load_lora_adapter(body: LoadBody) -> dict[str, Any]:
        """Load an adapter, or replace the adapter of this name. No pause is needed. lora_int_id stays the same."""
        return await load_folder(context, body.lora_name, body.lora_path) | {"status": "ok"}

    @routes.post("/skyrl/v1/abort_lora_requests", AdapterBody)
    async def abort_lora_requests(body: AdapterBody) -> dict[str, Any]:
        """Abort all requests of one adapter. Their clients get the tokens so far. A new tenant has no adapter yet: its
        first sync aborts nothing."""
        report = await context.client.call(m.AbortArgs(lora_name=body.lora_name))
        aborted = [request["request_id"] for request in report["aborted"]]
        return {"status": "ok", "aborted": aborted, "count": len(aborted), "requests": report["aborted"]}

    @routes.post("/fetch_weights", FetchBody)
    async def fetch_weights(body: FetchBody) -> dict[str, Any]:
        """Bring the local checkpoint to a published version. The engine is neither paused nor changed."""
        return {"status": "ok", "result": [await deltas.fetch(body)]}

    @routes.post("/finish_session", SessionBody, RouteAccess.DATA)
    async def finish_session(body: SessionBody) -> dict[str, Any]:
        """Answer a router that ties a session to a replica. There is nothing to release: the gateway of a
        fleet forgets the oldest sessions by itself. 0 is a valid session id."""
        return {"status": "ok", "session_id": body.session_id}

    return router


def worker_methods(weights: WeightUpdates) -> dict[str, Method]:
    """Return the methods that SkyRL calls on vLLM's workers, by all names that SkyRL has used."""

    async def init(kwargs: dict[str, Any]) -> None:
        await weights.init(kwargs.get("init_info"))

    async def start(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await weights.start(parse_body(kwargs, StartBody, {}))

    async def update(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await weights.add(await weights.part(kwargs.get("update_info")))

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


def memory_methods(context: ServingContext) -> dict[str, Method]:
    """Return SkyRL's sleep and wake-up around a weight sync. SkyRL pauses the engine before, and resumes it after.

    The sleep keeps the old weights on disk, so that they serve on if the sync fails."""
    client = context.client

    async def sleep(kwargs: dict[str, Any]) -> dict[str, Any]:
        keep_kv = parse_body(kwargs, SleepBody, {}).offload_kv
        tags = ("weight",) if keep_kv else ("weight", "kv_cache")
        return await client.call(m.SleepArgs(tags=tags, mode="keep", timeout_s=PAUSE_TIMEOUT_S))

    async def wake_up(kwargs: dict[str, Any]) -> dict[str, Any]:
        return await wake(client, [TAGS[tag] for tag in parse_body(kwargs, WakeBody, {}).tags])

    return {"skyrl_sleep_for_weight_sync": sleep, "skyrl_wake_for_weight_sync": wake_up}
