"""SGLang's routes that report the state of this server and change nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy import __version__
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import model_fields, server_arguments
from fastdeploy.http.errors import json_response
from fastdeploy.inter_communicator import messages as m


def add_routes(router: APIRouter, context: ServingContext) -> None:
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
        """Count frozen requests as running, and held requests as waiting."""
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": __version__, "loads": [await load()]})

    @router.get("/get_load")
    async def get_load() -> Response:
        return json_response([await load()])

    @router.get("/get_weight_version")
    async def get_weight_version() -> Response:
        info = await client.call(m.WeightInfoArgs())
        fields = {name: info[name] for name in ("weight_epoch", "boot_id")}
        return json_response({"weight_version": info["version"], **fields})

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """Answer 200 while an engine is connected, else 503. No token is generated: a paused engine is healthy."""
        await client.require_engine()
        return json_response({"status": "ok"})

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        info = await client.call(m.WeightInfoArgs())
        return json_response({**model_fields(context), "weight_version": info["version"]})

    @router.get("/get_server_info")
    async def get_server_info(request: Request) -> Response:
        """Answer as /server_info, without vLLM's fields."""
        return json_response(await server_arguments(context, request))
