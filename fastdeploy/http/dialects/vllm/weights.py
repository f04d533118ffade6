"""vLLM's weight-transfer routes: begin, chunks, commit, by calls that name no session.

NCCL groups and CUDA IPC handles mean nothing on this device. What a chunk may be is told by ``update_info``: a folder,
a shared memory segment, or instead of JSON the safetensors bytes themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField, WrongOrder
from fastdeploy.core.weight_source import FolderSource, SharedMemorySource, Source
from fastdeploy.http.body import Body, parse_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Checksums, Kv, Version
from fastdeploy.http.dialects.common import LaxBody, read_control, read_fields
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import takes
from fastdeploy.http.upload import is_upload, spooled_upload
from fastdeploy.inter_communicator import messages as m

PLACED_BY = "vllm"
BACKENDS = ("checkpoint", "shared_memory", "upload")
WHAT_WORKS = (
    "this device has no NCCL group, CUDA IPC or RDMA transport for weights; send update_info "
    '{"model_path": a folder of safetensors} or {"shared_memory": a name, "nbytes"}, or the bytes of a safetensors '
    "file as application/octet-stream"
)
DELTA_REFUSED = (
    "SkyRL's checkpoint deltas are not supported; let its policy worker send the weights by "
    "fastdeploy.rl.frameworks.skyrl, or "
    "send whole checkpoints by /start_weight_update, /update_weights and /finish_weight_update"
)
# The field of init_info by which SkyRL's delta strategy is known.
DELTA_FIELD = "local_checkpoint_dir"
# The fields of update_info by which the transports that do not exist here are known.
TRANSPORT_FIELDS = frozenset(
    {"names", "dtype_names", "shapes", "packed", "ipc_handles", "ipc_handles_pickled", "sizes"}
)


class StartBody(Body):
    """is_checkpoint_format: names and layout of the checkpoint; nothing else is known here. partial: tensors that do
    not arrive keep their value. Not the default: TRL finishes an update whose sending failed."""

    is_checkpoint_format: Literal[True] = True
    partial: bool = False
    kv: Kv = "keep"
    lease_s: float = Field(300.0, gt=0, le=86400)
    expected_version: Version | None = None
    weight_version: Version | None = None


class FinishBody(Body):
    weight_version: Version | None = None


class UpdateInfo(Body):
    """partial and kv: only of an update without a session; that of a session says them when it starts."""

    model_path: str | None = Field(None, min_length=1)
    shared_memory: str | None = Field(None, min_length=1)
    nbytes: int = Field(0, ge=0, le=2**63 - 1)
    checksums: Checksums = {}
    verify_checksum: bool = False
    weight_version: Version | None = None
    partial: bool = False
    kv: Kv = "keep"

    def source(self) -> Source:
        if (self.model_path is None) == (self.shared_memory is None):
            raise InvalidField("update_info", f"expected one of model_path and shared_memory: {WHAT_WORKS}")
        if self.model_path is not None:
            return FolderSource(self.model_path)
        return SharedMemorySource(self.shared_memory, self.nbytes)


class UpdateBody(LaxBody):
    """The body of /update_weights where it is JSON; parse_update_info reads it."""

    update_info: UpdateInfo


class InitInfo(Body):
    backend: Literal[*BACKENDS] = BACKENDS[0]


class InitBody(LaxBody):
    """The body of /init_weight_transfer_engine; check_init reads it."""

    init_info: InitInfo


class Chunk(NamedTuple):
    source: Source
    info: UpdateInfo


class VllmWeights:
    """Weight updates by vLLM's calls, which name no session and may reach any API server. The engine knows which
    session is open."""

    def __init__(self, context: ServingContext):
        self._context = context

    async def _call(self, args: m.Args) -> dict[str, Any]:
        return await self._context.client.call(args)

    async def open_session(self) -> str | None:
        """The session that this dialect opened; never that of another trainer."""
        session = (await self._call(m.WeightInfoArgs())).get("session") or {}
        return session["session_id"] if session.get("placed_by") == PLACED_BY else None

    async def start(self, body: StartBody) -> dict[str, Any]:
        args = m.BeginUpdateArgs(
            version=body.weight_version,
            expected_version=body.expected_version,
            kv=body.kv,
            partial=body.partial,
            lease_s=body.lease_s,
            placed_by=PLACED_BY,
        )
        return await self._call(args)

    async def add(self, chunk: Chunk) -> dict[str, Any]:
        """Put it into the open session; without one it is an update of its own, committed at once."""
        source, info = chunk
        session_id = await self.open_session()
        if session_id is None:
            args: m.Args = m.UpdateWeightsArgs(
                source,
                version=info.weight_version,
                kv=info.kv,
                partial=info.partial,
                checksums=info.checksums,
                verify_checksum=info.verify_checksum,
            )
        else:
            for field in {"partial", "kv"} & info.model_fields_set:
                raise InvalidField(f"update_info.{field}", "is said to /start_weight_update, of all its chunks")
            args = m.UpdateChunkArgs(
                session_id,
                source,
                version=info.weight_version,
                checksums=info.checksums,
                verify_checksum=info.verify_checksum,
            )
        return await self._call(args)

    async def finish(self, version: str | None) -> dict[str, Any]:
        session_id = await self.open_session()
        if session_id is None:
            raise WrongOrder("no weight update is open: it was never started, has failed, or its lease has ended")
        return await self._call(m.CommitUpdateArgs(session_id, version=version))


def check_init(info: Any) -> None:
    """Nothing needs to be set up for what works here; a transport that does not is refused before anybody waits for it
    to connect."""
    if not isinstance(info, dict):
        raise InvalidField("init_info", "expected an object")
    if DELTA_FIELD in info:
        raise InvalidField("init_info", DELTA_REFUSED)
    if info.keys() - {"backend"} or info.get("backend", BACKENDS[0]) not in BACKENDS:
        raise InvalidField("init_info", WHAT_WORKS)


def parse_update_info(info: Any) -> Chunk:
    if not isinstance(info, dict):
        raise InvalidField("update_info", f"expected an object: {WHAT_WORKS}")
    if TRANSPORT_FIELDS & info.keys():
        raise InvalidField("update_info", WHAT_WORKS)
    parsed = parse_body(info, UpdateInfo, {})
    return Chunk(parsed.source(), parsed)


@contextlib.asynccontextmanager
async def read_chunk(request: Request, context: ServingContext, weights: VllmWeights) -> AsyncIterator[Chunk]:
    """The chunk that the call names or uploads; an upload is in a file for as long as the block lasts."""
    if is_upload(request):
        info = parse_body(dict(request.query_params), UpdateInfo, {})
        begin = m.BeginUpdateArgs(info.weight_version, kv=info.kv, partial=info.partial)
        check = m.CheckUpdateArgs(await weights.open_session(), begin)
        async with spooled_upload(request, context, check) as source:
            yield Chunk(source, info)
    else:
        yield parse_update_info((await read_fields(request)).get("update_info"))


def add_weight_routes(router: APIRouter, context: ServingContext) -> None:
    weights = VllmWeights(context)

    @router.post("/init_weight_transfer_engine", openapi_extra=takes(InitBody))
    async def init_weight_transfer_engine(request: Request) -> Response:
        check_init((await read_fields(request)).get("init_info"))
        return json_response({"message": "Weight transfer initialized"})

    @router.post("/start_weight_update", openapi_extra=takes(StartBody, query=True))
    async def start_weight_update(request: Request) -> Response:
        begun = await weights.start(await read_control(request, StartBody))
        return json_response({"message": "Weight update started", **begun})

    @router.post("/update_weights", openapi_extra=takes(UpdateBody, upload=UpdateInfo))
    async def update_weights(request: Request) -> Response:
        async with read_chunk(request, context, weights) as chunk:
            report = await weights.add(chunk)
        return json_response({"message": "Weights updated", "report": report})

    @router.post("/finish_weight_update", openapi_extra=takes(FinishBody, query=True))
    async def finish_weight_update(request: Request) -> Response:
        report = await weights.finish((await read_control(request, FinishBody)).weight_version)
        reply = {"message": "Weight update finished", "weight_version": report.get("version")}
        return json_response({**reply, "report": report})
