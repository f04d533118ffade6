"""SGLang's weight routes. An update is one atomic commit of the engine, whatever way its tensors came."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import field_validator
from starlette.responses import Response

from fastdeploy.core.errors import STATUS, FastDeployError, InvalidField, WrongOrder
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Label
from fastdeploy.http.dialects.common import LaxBody
from fastdeploy.http.dialects.sglang.control import read_lax
from fastdeploy.http.dialects.sglang.pull import Pulls
from fastdeploy.http.dialects.sglang.tensors import (
    TensorBody,
    distinct,
    parse_tensors,
    require_format,
    require_target,
    version_label,
)
from fastdeploy.http.dialects.sglang.updates import PLACED_BY, SGLangWeights, Update
from fastdeploy.http.errors import error_body, json_response
from fastdeploy.http.openapi import described, takes
from fastdeploy.http.upload import admitted_upload, spooled_bytes
from fastdeploy.inter_communicator import messages as m

# How SGLang's loaders read a folder; all of these mean whole tensors under their own names.
DISK_FORMATS = (None, "auto", "safetensors")
NO_GROUP = "this device has no process group for weights: use /update_weights_from_disk or /update_weights_from_tensor"
NO_IPC = "this device has no CUDA IPC handles: use /update_weights_from_disk or /update_weights_from_tensor"
NO_ADAPTERS = "this server serves no adapters"
NO_PROFILER = "this server has no profiler"
# What SGLang has and this device, or this server, has not.
ABSENT = {
    "/init_weights_update_group": NO_GROUP,
    "/update_weights_from_distributed": NO_GROUP,
    "/destroy_weights_update_group": NO_GROUP,
    "/update_weights_from_ipc": NO_IPC,
    "/load_lora_adapter": NO_ADAPTERS,
    "/load_lora_adapter_from_tensors": NO_ADAPTERS,
    "/unload_lora_adapter": NO_ADAPTERS,
    "/start_profile": NO_PROFILER,
    "/stop_profile": NO_PROFILER,
}

Route = Callable[[Request], Awaitable[Response]]


class VersionedBody(LaxBody):
    """An integer becomes the label that it reads as."""

    weight_version: Annotated[str | None, described(Label | None)] = None
    abort_all_requests: bool = False

    @field_validator("weight_version", mode="plain")
    @classmethod
    def _label(cls, value: Any) -> str:
        return version_label(value)


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


def sglang_shape(**extra: Any) -> Callable[[Route], Route]:
    """A refusal in the shape that SGLang's clients read: success false, status 400. That of a fault of the server's own
    keeps its status."""

    def decorate(route: Route) -> Route:
        @functools.wraps(route)
        async def run(request: Request) -> Response:
            try:
                return await route(request)
            except FastDeployError as error:
                status = STATUS.get(error.code, 500)
                body = {"success": False, "message": error.message, **extra, **error_body(error)}
                return json_response(body, 400 if status < 500 else status)

        return run

    return decorate


def success(message: str, **fields: Any) -> Response:
    return json_response({"success": True, "message": message, **fields})


def add_weight_routes(router: APIRouter, context: ServingContext) -> None:
    _add_updates(router, context)
    _add_session(router, context)
    _add_folders(router, context)
    for path, why in ABSENT.items():
        _add_refusal(router, path, why)


def _add_refusal(router: APIRouter, path: str, why: str) -> None:
    @router.post(path)
    @sglang_shape(error_message=why)
    async def refuse(request: Request) -> Response:
        raise InvalidField(path.removeprefix("/"), why)


def _add_updates(router: APIRouter, context: ServingContext) -> None:
    weights = SGLangWeights(context)

    @router.post("/update_weights_from_disk", openapi_extra=takes(DiskBody))
    @sglang_shape(num_paused_requests=0)
    async def update_weights_from_disk(request: Request) -> Response:
        body = await read_lax(request, DiskBody)
        require_format(body.load_format, DISK_FORMATS)
        if body.manifest:
            raise InvalidField("manifest", "not supported by this server")
        source = FolderSource(body.model_path)
        update = Update([source], body.weight_version, body.abort_all_requests, body.flush_cache, partial=False)
        report = await weights.add(update)
        paused = report.get("requests_in_flight", 0) if report.get("state") == "paused" else 0
        return success("Succeeded to update model weights.", num_paused_requests=paused, report=report)

    @router.post("/update_weights_from_tensor", openapi_extra=takes(TensorBody))
    @sglang_shape()
    async def update_weights_from_tensor(request: Request) -> Response:
        check = m.CheckUpdateArgs(await weights.open_session(), m.BeginUpdateArgs(partial=True))
        async with contextlib.AsyncExitStack() as files:
            await files.enter_async_context(admitted_upload(context, check))
            body = await asyncio.to_thread(parse_tensors, await request.body())
            version = None if body.weight_version is None else str(body.weight_version)
            sources = [await files.enter_async_context(spooled_bytes(d, context)) for d in distinct(body)]
            update = Update(sources, version, bool(body.abort_all_requests), bool(body.flush_cache), partial=True)
            report = await weights.add(update)
        return success("Success", report=report)


def _add_session(router: APIRouter, context: ServingContext) -> None:
    weights = SGLangWeights(context)

    @router.post("/begin_weight_update", openapi_extra=takes(BeginBody))
    @sglang_shape()
    async def begin_weight_update(request: Request) -> Response:
        require_target((await read_lax(request, BeginBody)).selector)
        begun = await weights.call(m.BeginUpdateArgs(partial=True, placed_by=PLACED_BY))
        return success("Success", session_id=begun["session_id"], lease_s=begun["lease_s"])

    @router.post("/end_weight_update", openapi_extra=takes(VersionedBody))
    @sglang_shape()
    async def end_weight_update(request: Request) -> Response:
        body = await read_lax(request, VersionedBody)
        session_id = await weights.open_session()
        if session_id is None:
            raise WrongOrder("no weight update is open: it was never begun, has failed, or its lease has ended")
        report = await weights.call(m.CommitUpdateArgs(session_id, version=body.weight_version))
        await weights.flush()
        return success("Success", report=report)

    @router.post("/post_process_weights")
    @sglang_shape()
    async def post_process_weights(request: Request) -> Response:
        """Weights are packed when they are committed: nothing is left to do."""
        return success("Success")


def _add_folders(router: APIRouter, context: ServingContext) -> None:
    weights, pulls = SGLangWeights(context), Pulls(context.config)

    @router.post("/pull_weights", openapi_extra=takes(PullBody))
    @sglang_shape()
    async def pull(request: Request) -> Response:
        """Copies a published version to a local folder; what serves is not touched, nor paused."""
        body = await read_lax(request, PullBody)
        await pulls.pull(body.local_checkpoint_dir, body.source_dir, body.target_version)
        return success(f"pulled version {body.target_version}")

    @router.get("/weights_checker")
    @router.post("/weights_checker", openapi_extra=takes(CheckBody))
    @sglang_shape()
    async def weights_checker(request: Request) -> Response:
        body = await read_lax(request, CheckBody)
        if body.action != "checksum":
            raise InvalidField("action", f"expected checksum, got {body.action!r}")
        info = await weights.call(m.WeightInfoArgs(checksums=True))
        role = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1,
                "rank": 0, "size": 1}  # fmt: skip
        rank = {"checksums": info["checksums"], "per_gpu_checksum": info["checksum"], "parallelism_info": [role]}
        return success("Success", ranks=[rank], per_engine_checksum=info["checksum"])
