"""SGLang's weight routes. Each update is one atomic commit of the engine, however its tensors arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.weight_source import FolderSource, Source
from fastdeploy.http.body import LaxBody
from fastdeploy.http.calls import Routes, catching, read_body
from fastdeploy.http.checkpoint_deltas.formats import SlimeVersions
from fastdeploy.http.checkpoint_deltas.pulls import Pulls
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import OpenWeightSession, place_pause, sglang_error, success
from fastdeploy.http.dialects.sglang.tensor_upload import (
    TensorBody,
    VersionedBody,
    parse_tensors,
    require_format,
    require_target,
)
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.http.upload import admitted_upload, spooled_bytes
from fastdeploy.inter_communicator import messages as m

PLACED_BY = "sglang"
# The hold around one commit ends by itself after this time if the API server dies before it releases the hold.
COMMIT_HOLD_TTL_S = 300.0
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
    routes, weights = Routes(router, read_body), WeightUpdates(context.client)
    _add_updates(router, routes, context, weights)
    _add_session(routes, weights)
    _add_files_and_checks(router, routes, context)


def _add_updates(router: APIRouter, routes: Routes, context: ServingContext, weights: WeightUpdates) -> None:
    @routes.post("/update_weights_from_disk", DiskBody, errors=sglang_error(num_paused_requests=0))
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
    @catching(sglang_error())
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
    @routes.post("/begin_weight_update", BeginBody, errors=sglang_error())
    async def begin_weight_update(body: BeginBody) -> dict[str, Any]:
        require_target(body.selector)
        begun = await weights.begin()
        return success("Success", session_id=begun["session_id"], lease_s=begun["lease_s"])

    @routes.post("/end_weight_update", VersionedBody, errors=sglang_error())
    async def end_weight_update(body: VersionedBody) -> dict[str, Any]:
        return success("Success", report=await weights.end(body.weight_version))


def _add_files_and_checks(router: APIRouter, routes: Routes, context: ServingContext) -> None:
    pulls = Pulls(context.config)

    @router.post("/post_process_weights")
    async def post_process_weights() -> Response:
        """Do nothing: weights are packed as they arrive."""
        return json_response(success("Success"))

    @routes.post("/pull_weights", PullBody, errors=sglang_error())
    async def pull(body: PullBody) -> dict[str, Any]:
        """Bring a local folder to a published version. The engine is neither paused nor changed."""
        versions = SlimeVersions(context.config.model, body.source_dir, context.config.model_roots)
        await pulls.pull(body.local_checkpoint_dir, versions, body.target_version)
        return success(f"pulled version {body.target_version}")

    @router.get("/weights_checker")
    @router.post("/weights_checker", openapi_extra=takes(CheckBody))
    @catching(sglang_error())
    async def weights_checker(request: Request) -> Response:
        body = await read_body(request, CheckBody)
        if body.action != "checksum":
            raise InvalidField("action", f"expected checksum, got {body.action!r}")
        info = await context.client.call(m.WeightInfoArgs(checksums=True))
        ranks, sizes = ("tp_rank", "dp_rank", "pp_rank", "rank"), ("tp_size", "dp_size", "pp_size", "size")
        role = {"role": "target", **dict.fromkeys(ranks, 0), **dict.fromkeys(sizes, 1)}
        rank = {"checksums": info["checksums"], "per_gpu_checksum": info["checksum"], "parallelism_info": [role]}
        return json_response(success("Success", ranks=[rank], per_engine_checksum=info["checksum"]))


class Update(NamedTuple):
    """The tensors of one call. sources: at least one. abort_all: end the requests in flight, and start none until the
    new weights serve; an update that is refused aborts nothing. partial: tensors that do not arrive keep their value.
    flush: drop the prefix cache."""

    sources: Sequence[Source]
    version: str | None
    abort_all: bool
    flush: bool
    partial: bool


class WeightUpdates:
    """Weight updates by calls that may reach any API server. The engine knows which session is open."""

    def __init__(self, client: ServingClient):
        self._client = client
        self._session = OpenWeightSession(client, PLACED_BY)

    async def begin(self) -> dict[str, Any]:
        return await self._session.begin(partial=True)

    async def add(self, update: Update) -> dict[str, Any]:
        """Add the tensors to SGLang's open session. Without an open session the tensors are an update of their own,
        which is committed at once."""
        first, *others = update.sources
        receipt = await self._session.add(first, version=update.version)
        if receipt is None:
            return await self._publish(update)
        for source in others:
            receipt = await self._client.call(m.UpdatePartArgs(receipt["session_id"], source, update.version))
        if update.abort_all:
            await self._client.call(m.AbortArgs(abort_all=True))
        return receipt

    async def end(self, version: str | None) -> dict[str, Any]:
        """Commit the open session. Raises WrongOrder if there is none."""
        report = await self._session.commit(version)
        await self._flush()
        return report

    async def _flush(self) -> None:
        """Free the cached blocks of older weights at once. No request would match them again."""
        await self._client.call(m.ResetCacheArgs())

    async def _publish(self, update: Update) -> dict[str, Any]:
        version, partial = update.version, update.partial
        if len(update.sources) == 1 and not update.abort_all:
            args = m.UpdateWeightsArgs(update.sources[0], version=version, partial=partial)
            report = await self._client.call(args)
        else:
            report = await self._publish_in_steps(update)
        if update.flush:
            await self._flush()
        return report

    async def _publish_in_steps(self, update: Update) -> dict[str, Any]:
        """Publish by a session of this call alone: no other call adds to the session."""
        placed_by = f"{PLACED_BY} (one call)"
        begin = m.BeginUpdateArgs(version=update.version, partial=update.partial, placed_by=placed_by)
        session_id = (await self._client.call(begin))["session_id"]
        try:
            for source in update.sources:
                await self._client.call(m.UpdatePartArgs(session_id, source))
            commit = m.CommitUpdateArgs(session_id)
            return await (self._commit_alone(commit) if update.abort_all else self._client.call(commit))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await self._client.call(m.AbortUpdateArgs(session_id))
            raise

    async def _commit_alone(self, commit: m.CommitUpdateArgs) -> dict[str, Any]:
        """Commit while no request is in flight. The pause for that has a hold of its own, so that an engine that was
        paused before stays paused."""
        hold_id = f"update-{commit.session_id}"
        try:
            await place_pause(self._client, "abort", None, PLACED_BY, COMMIT_HOLD_TTL_S, hold_id)
            return await self._client.call(commit)
        finally:
            await self._client.call(m.ResumeArgs(hold_id=hold_id))
