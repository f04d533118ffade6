"""vLLM's weight-transfer routes: begin, parts, commit, by calls that name no session.

This device has neither NCCL groups nor CUDA IPC handles. Instead ``update_info`` names a folder or a shared memory
segment, or the body is the bytes of a safetensors file. SkyRL's checkpoint deltas come through these routes too (see
dialects/skyrl/deltas.py).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FolderSource, Source
from fastdeploy.http.body import Body, LaxBody, parse_body
from fastdeploy.http.calls import Routes, read_fields
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Kv, SourceBody, Version
from fastdeploy.http.dialects.common import OpenWeightSession
from fastdeploy.http.dialects.skyrl.deltas import INIT_FIELD, UPDATE_FIELD, CheckpointDeltas
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.http.upload import admitted_upload, is_upload, spooled_upload, upload_update
from fastdeploy.inter_communicator import messages as m

PLACED_BY = "vllm"
NO_SESSION_FIELDS = {"partial", "kv"}  # in a session, /start_weight_update sets them
Backend = Literal["checkpoint", "shared_memory", "upload"]
WHAT_WORKS = (
    "this device has no NCCL group, CUDA IPC or RDMA transport for weights; send update_info "
    '{"model_path": a folder of safetensors} or {"shared_memory": a name, "nbytes"}, or the bytes of a safetensors '
    "file as application/octet-stream"
)
# Transports that do not exist here send these fields in update_info.
TRANSPORT_FIELDS = frozenset(
    {"names", "dtype_names", "shapes", "packed", "ipc_handles", "ipc_handles_pickled", "sizes"}
)


class StartBody(Body):
    """The fields of a weight session. is_checkpoint_format: tensors have the names and layout of a checkpoint. This
    server knows no other format. partial: tensors that do not arrive keep their value. The default is false, since TRL
    finishes an update even if sending it failed."""

    is_checkpoint_format: Literal[True] = True
    partial: bool = False
    kv: Kv = "keep"
    lease_s: float = Field(300.0, gt=0, le=86400)
    expected_version: Version | None = None
    weight_version: Version | None = None


class FinishBody(Body):
    weight_version: Version | None = None


class UpdateInfo(SourceBody):
    """The source and the label of an update. partial, kv: for an update without a session only. In a session,
    /start_weight_update sets them."""

    weight_version: Version | None = None
    partial: bool = False
    kv: Kv = "keep"


class UpdateBody(LaxBody):
    """The JSON body of /update_weights, as the API description shows it: one of its fields. See WeightUpdates.part, and
    WeightDirBody."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class WeightDirBody(LaxBody):
    """The body of prime-rl's call: a folder with a whole checkpoint, which becomes an update of its own."""

    weight_dir: str = Field(min_length=1)

    def update(self) -> m.UpdateWeightsArgs:
        return Part(FolderSource(self.weight_dir), UpdateInfo.model_validate({})).update()


class InitInfo(Body):
    backend: Backend = "checkpoint"


class InitBody(LaxBody):
    """The body of /init_weight_transfer_engine, as the API description shows it. See WeightUpdates.init."""

    init_info: InitInfo


class Part(NamedTuple):
    source: Source
    info: UpdateInfo

    def update(self) -> m.UpdateWeightsArgs:
        """Return the call that makes an update of its own from this part."""
        info = self.info
        fields = {"version": info.weight_version, **_part_fields(info)}
        return m.UpdateWeightsArgs(self.source, kv=info.kv, partial=info.partial, **fields)


class WeightUpdates:
    """Weight updates by calls that may reach any API server. The engine knows which session is open."""

    def __init__(self, client: ServingClient, deltas: CheckpointDeltas):
        self._client, self._deltas = client, deltas
        self._session = OpenWeightSession(client, PLACED_BY)
        self.finish = self._session.commit

    async def init(self, info: Any) -> None:
        """Prepare for the transport that ``info`` names. Only SkyRL's checkpoint deltas need that. Raises InvalidField
        for a transport that does not exist here, before a client waits for a connection."""
        if not isinstance(info, dict):
            raise InvalidField("init_info", "expected an object")
        if INIT_FIELD in info:
            await self._deltas.init(info)
        elif info.keys() - {"backend"} or info.get("backend", "checkpoint") not in get_args(Backend):
            raise InvalidField("init_info", WHAT_WORKS)

    async def part(self, info: Any) -> Part:
        """Return the part that ``info`` names: one of its own, or the local checkpoint of SkyRL's deltas."""
        if isinstance(info, dict) and UPDATE_FIELD in info:
            source, version = await self._deltas.prepared(info)
            return Part(source, UpdateInfo.model_validate({"weight_version": version}))
        return parse_update_info(info)

    async def start(self, body: StartBody) -> dict[str, Any]:
        fields = body.model_dump(exclude={"is_checkpoint_format", "weight_version"})
        return await self._session.begin(version=body.weight_version, **fields)

    async def add(self, part: Part) -> dict[str, Any]:
        """Add the tensors to vLLM's open session. Without an open session the tensors are an update of their own, which
        is committed at once."""
        source, info = part
        if not NO_SESSION_FIELDS & info.model_fields_set:
            if receipt := await self._session.add(source, version=info.weight_version, **_part_fields(info)):
                return receipt
        else:
            session = (await self._client.call(m.WeightInfoArgs()))["session"]
            if session is not None and session["placed_by"] == PLACED_BY:
                _refuse_session_fields(info)
        return await self._client.call(part.update())

    async def upload(self, request: Request, context: ServingContext) -> dict[str, Any]:
        """Add the body of ``request``, as :meth:`add` does."""
        info = parse_body(dict(request.query_params), UpdateInfo, {})
        begin = m.BeginUpdateArgs(info.weight_version, kv=info.kv, partial=info.partial)
        check = m.CheckUpdateArgs(begin=begin, placed_by=PLACED_BY, form=info.form)
        session_id = (await self._client.call(check))["session_id"]
        if session_id is None:
            return await upload_update(request, context, check, info.checksums, info.verify_checksum)
        _refuse_session_fields(info)
        check = m.CheckUpdateArgs(session_id, form=info.form)
        async with admitted_upload(context, check), spooled_upload(request, context) as source:
            fields = {"version": info.weight_version, **_part_fields(info)}
            return await self._client.call(m.UpdatePartArgs(session_id, source, **fields))


def _part_fields(info: UpdateInfo) -> dict[str, Any]:
    return {"checksums": info.checksums, "verify_checksum": info.verify_checksum, "form": info.form}


def _refuse_session_fields(info: UpdateInfo) -> None:
    if named := NO_SESSION_FIELDS & info.model_fields_set:
        raise InvalidField(f"update_info.{min(named)}", "is set by /start_weight_update for the whole session")


def parse_update_info(info: Any) -> Part:
    if not isinstance(info, dict):
        raise InvalidField("update_info", f"expected an object: {WHAT_WORKS}")
    if TRANSPORT_FIELDS & info.keys():
        raise InvalidField("update_info", WHAT_WORKS)
    parsed = parse_body(info, UpdateInfo, {})
    return Part(parsed.source("update_info", f"model_path and shared_memory: {WHAT_WORKS}"), parsed)


def add_routes(router: APIRouter, context: ServingContext) -> None:
    weights, routes = WeightUpdates(context.client, CheckpointDeltas(context.config)), Routes(router)

    @router.post("/init_weight_transfer_engine", openapi_extra=takes(InitBody))
    async def init_weight_transfer_engine(request: Request) -> Response:
        await weights.init((await read_fields(request)).get("init_info"))
        return json_response({"message": "Weight transfer initialized"})

    @routes.post("/start_weight_update", StartBody)
    async def start_weight_update(body: StartBody) -> dict[str, Any]:
        return {"message": "Weight update started", **await weights.start(body)}

    @router.post("/update_weights", openapi_extra=takes(UpdateBody, upload=UpdateInfo))
    async def update_weights(request: Request) -> Response:
        if is_upload(request):
            report = await weights.upload(request, context)
        elif (fields := await read_fields(request)).keys() & {"weight_dir"}:
            report = await context.client.call(parse_body(fields, WeightDirBody, {}).update())
        else:
            report = await weights.add(await weights.part(fields.get("update_info")))
        return json_response({"message": "Weights updated", "report": report})

    @routes.post("/finish_weight_update", FinishBody)
    async def finish_weight_update(body: FinishBody) -> dict[str, Any]:
        report = await weights.finish(body.weight_version)
        return {"message": "Weight update finished", "weight_version": report.get("version"), "report": report}
