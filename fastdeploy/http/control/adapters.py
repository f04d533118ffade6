"""Native adapter routes: /v1/adapters, /v1/adapters/{load,unload,export}, and the calls that the routes of all dialects
share.

An adapter comes from a PEFT folder (lora_path). Or its tensors come from shared memory or as the body of the call, and
``config`` is the content of its adapter_config.json. Such a body is one safetensors file, its type is
application/octet-stream, and all other fields are in the query.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from io import FileIO
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response, StreamingResponse

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import InvalidField, UpdateInProgress
from fastdeploy.core.files import open_regular
from fastdeploy.core.weight_source import FolderSource, SharedMemorySource, Source
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.body import Body, parse_json
from fastdeploy.http.calls import Routes, envelope, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Kv, LoraName, Seconds, Version
from fastdeploy.http.control.weights import in_header, passed_on, pieces
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import admitted_upload, is_upload, spooled_upload
from fastdeploy.inter_communicator import messages as m


def adapter_config(value: Any) -> Any:
    """Return the content of an adapter_config.json, which is JSON if it came in the query. Raises ValueError."""
    try:
        config = parse_json(value.encode()) if isinstance(value, str) else value
        msgspec.msgpack.encode(config)
    except (InvalidField, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError("expected the content of an adapter_config.json, with integers of at most 64 bits") from error
    return config


AdapterConfig = Annotated[dict[str, Any], BeforeValidator(adapter_config)]


class LoadBody(Body):
    """The fields of a load. replace: false refuses a name that is loaded."""

    lora_name: LoraName
    lora_path: str | None = Field(None, min_length=1)
    shared_memory: str | None = Field(None, min_length=1)
    nbytes: int = Field(0, ge=0, le=2**63 - 1)
    config: AdapterConfig | None = None
    version: Version | None = None
    kv: Kv = "keep"
    replace: bool = True
    timeout_s: Seconds | None = None

    def options(self) -> dict[str, Any]:
        """All fields but those of the source."""
        return self.model_dump(exclude={"lora_path", "shared_memory", "nbytes"})


class UnloadBody(Body):
    lora_name: LoraName


class ExportBody(Body):
    """The adapter to export, and the file of its PEFT folder."""

    lora_name: LoraName
    file: Literal["adapter_config.json", "adapter_model.safetensors"] = "adapter_model.safetensors"


def adapters_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/adapters")
    @RouteAccess.DATA
    async def adapters() -> Response:
        return envelope({"adapters": await known_adapters(context)})

    @router.post("/v1/adapters/load", openapi_extra=takes(LoadBody, upload=LoadBody))
    async def load(request: Request) -> Response:
        """Load an adapter, or replace the adapter of this name between two steps. A refused adapter changes nothing."""
        body = await read(request, LoadBody)
        check_name(context, body.lora_name)  # before an upload
        async with _source(request, context, body) as source:
            args = m.LoadAdapterArgs(source=source, path=body.lora_path or "", **body.options())
            return envelope(await context.client.call(args))

    @Routes(router, read, envelope).post("/v1/adapters/unload", UnloadBody)
    async def unload(body: UnloadBody) -> dict[str, Any]:
        """Remove the name at once. Running requests of the adapter finish on the weights that they have."""
        return await context.client.call(m.UnloadAdapterArgs(body.lora_name))

    @router.get("/v1/adapters/export", openapi_extra=asks(ExportBody))
    async def export_adapter(request: Request) -> Response:
        """Answer a file of the adapter, byte for byte as it was loaded. Headers: X-Adapter-Epoch, X-Adapter-Version
        (percent-encoded) and X-Adapter-Fingerprint, which tell whether two files are of one adapter. The gateway of a
        fleet answers the copy of one replica."""
        body = await read(request, ExportBody)
        client = context.client
        answer = client.remote_adapter_export(body.lora_name, body.file) if isinstance(client, FleetClient) else None
        if answer is not None:
            return await passed_on(answer)
        file, headers = await open_copy(client, body.lora_name, body.file)
        return StreamingResponse(pieces(file), headers=headers, media_type="application/octet-stream")

    return router


async def open_copy(client: ServingClient, lora_name: str, name: str) -> tuple[FileIO, dict[str, str]]:
    """Return the file ``name`` of the copy of an adapter that the engine keeps, and the headers that describe it."""
    copy = await client.call(m.ExportAdapterArgs(lora_name))
    try:
        fd = open_regular(os.path.join(copy["path"], name))
    except FileNotFoundError as error:
        raise UpdateInProgress("the adapter was replaced or unloaded meanwhile: ask again") from error
    headers = {
        "Content-Length": str(os.fstat(fd).st_size),
        "X-Adapter-Epoch": str(copy["adapter_epoch"]),
        "X-Adapter-Version": in_header(copy["version"]),
        "X-Adapter-Fingerprint": copy["fingerprint"],
    }
    return os.fdopen(fd, "rb", buffering=0), headers


def check_name(context: ServingContext, lora_name: str) -> None:
    """Raise InvalidField if ``lora_name`` means the base model, or another adapter, in requests."""
    if context.adapter(lora_name) != lora_name:
        why = "expected no name of the base model, nor such a name with a colon and more behind it"
        raise InvalidField("lora_name", f"{why}, got {lora_name!r}")


async def load_adapter(context: ServingContext, args: m.LoadAdapterArgs) -> dict[str, Any]:
    """Load an adapter, and return the engine's report. Raises InvalidField for a name that requests cannot use."""
    check_name(context, args.lora_name)
    return await context.client.call(args)


async def load_folder(context: ServingContext, lora_name: str, path: str, **options: Any) -> dict[str, Any]:
    """Load a PEFT folder, as :func:`load_adapter`. options: fields of LoadAdapterArgs."""
    return await load_adapter(context, m.LoadAdapterArgs(lora_name, FolderSource(path), path=path, **options))


async def known_adapters(context: ServingContext) -> list[dict[str, Any]]:
    """Return a description of each adapter that requests can name. See messages.AdaptersArgs."""
    return (await context.client.call(m.AdaptersArgs()))["adapters"]


@contextlib.asynccontextmanager
async def _source(request: Request, context: ServingContext, body: LoadBody) -> AsyncIterator[Source]:
    """Yield the source that the call names. An uploaded body is kept in a file while the block runs."""
    upload = is_upload(request)
    if [upload, body.shared_memory is not None, body.lora_path is not None].count(True) != 1:
        raise InvalidField("lora_path", "expected one of lora_path, shared_memory, or an octet-stream body")
    if (body.config is None) != (body.lora_path is not None):
        raise InvalidField("config", "expected with shared_memory or an octet-stream body, and not with lora_path")
    if upload:
        async with admitted_upload(context, None), spooled_upload(request, context) as source:
            yield source
    elif body.shared_memory is not None:
        yield SharedMemorySource(body.shared_memory, body.nbytes)
    else:
        yield FolderSource(str(body.lora_path))
