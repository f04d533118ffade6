"""SGLang's weight routes. Each update is one atomic commit of the engine, however its tensors arrived."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.body import LaxBody
from fastdeploy.http.checkpoint_deltas.pulls import Pulls
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import Routes, read_lax, sglang_errors, success
from fastdeploy.http.dialects.sglang.published_weights import SlimeStream
from fastdeploy.http.dialects.sglang.tensor_upload import (
    TensorBody,
    VersionedBody,
    parse_tensors,
    require_format,
    require_target,
)
from fastdeploy.http.dialects.sglang.weight_updates import PLACED_BY, Update, WeightUpdates
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.http.upload import admitted_upload, spooled_bytes
from fastdeploy.inter_communicator import messages as m

# SGLang's loaders of a folder. All of these mean whole tensors under their own names.
DISK_FORMATS = (None, "auto", "safetensors")


class DiskBody(VersionedBody):
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    manifest: Any = None


class BeginBody(LaxBody):
    selector: str | None = None


class CheckBody(LaxBody):
    action: str = "checksum"


class PullBody(LaxBody):
    local_checkpoint_dir: str
    source_dir: str
    target_version: int


def add_routes(router: APIRouter, context: ServingContext) -> None:
    routes, weights = Routes(router, query=False, sglang_errors=True), WeightUpdates(context.client)
    _add_updates(router, routes, context, weights)
    _add_session(routes, weights)
    _add_files_and_checks(router, routes, context)


def _add_updates(router: APIRouter, routes: Routes, context: ServingContext, weights: WeightUpdates) -> None:
    @routes.post("/update_weights_from_disk", DiskBody, num_paused_requests=0)
    async def update_weights_from_disk(body: DiskBody) -> dict[str, Any]:
        require_format(body.load_format, DISK_FORMATS)
        if body.manifest:
            raise InvalidField("manifest", "not supported by this server")
        source = FolderSource(body.model_path)
        update = Update([source], body.weight_version, body.abort_all_requests, body.flush_cache, partial=False)
        report = await weights.add(update)
        paused = report.get("requests_in_flight", 0) if report.get("state") == "paused" else 0
        return success("Succeeded to update model weights.", num_paused_requests=paused, report=report)

    @router.post("/update_weights_from_tensor", openapi_extra=takes(TensorBody))
    @sglang_errors()
    async def update_weights_from_tensor(request: Request) -> Response:
        check = m.CheckUpdateArgs(begin=m.BeginUpdateArgs(partial=True), placed_by=PLACED_BY)
        async with contextlib.AsyncExitStack() as files:
            await files.enter_async_context(admitted_upload(context, check))
            body = await asyncio.to_thread(parse_tensors, await request.body())
            version = body.version
            uploads = [spooled_bytes(data, context) for data in body.distinct_tensors()]
            sources = [await files.enter_async_context(upload) for upload in uploads]
            abort_all, flush = bool(body.abort_all_requests), bool(body.flush_cache)
            report = await weights.add(Update(sources, version, abort_all, flush, partial=True))
        return json_response(success("Success", report=report))


def _add_session(routes: Routes, weights: WeightUpdates) -> None:
    @routes.post("/begin_weight_update", BeginBody)
    async def begin_weight_update(body: BeginBody) -> dict[str, Any]:
        require_target(body.selector)
        begun = await weights.begin()
        return success("Success", session_id=begun["session_id"], lease_s=begun["lease_s"])

    @routes.post("/end_weight_update", VersionedBody)
    async def end_weight_update(body: VersionedBody) -> dict[str, Any]:
        return success("Success", report=await weights.end(body.weight_version))


def _add_files_and_checks(router: APIRouter, routes: Routes, context: ServingContext) -> None:
    pulls = Pulls(context.config)

    @router.post("/post_process_weights")
    async def post_process_weights() -> Response:
        """Do nothing: weights are packed as they arrive."""
        return json_response(success("Success"))

    @routes.post("/pull_weights", PullBody)
    async def pull(body: PullBody) -> dict[str, Any]:
        """Bring a local folder to a published version. The engine is neither paused nor changed."""
        stream = SlimeStream(context.config.model, body.source_dir, context.config.model_roots)
        await pulls.pull(body.local_checkpoint_dir, stream, body.target_version)
        return success(f"pulled version {body.target_version}")

    @router.get("/weights_checker")
    @router.post("/weights_checker", openapi_extra=takes(CheckBody))
    @sglang_errors()
    async def weights_checker(request: Request) -> Response:
        body = await read_lax(request, CheckBody)
        if body.action != "checksum":
            raise InvalidField("action", f"expected checksum, got {body.action!r}")
        info = await context.client.call(m.WeightInfoArgs(checksums=True))
        ranks, sizes = ("tp_rank", "dp_rank", "pp_rank", "rank"), ("tp_size", "dp_size", "pp_size", "size")
        role = {"role": "target", **dict.fromkeys(ranks, 0), **dict.fromkeys(sizes, 1)}
        rank = {"checksums": info["checksums"], "per_gpu_checksum": info["checksum"], "parallelism_info": [role]}
        return json_response(success("Success", ranks=[rank], per_engine_checksum=info["checksum"]))
