"""GET /v1/adapters/export: the server's own copy of an adapter, one of its two files at a time."""

from __future__ import annotations

import os
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from fastdeploy.core.errors import UpdateInProgress
from fastdeploy.core.safe_files import open_regular
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.body import Body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.pause import read
from fastdeploy.http.control.protocol import LoraName
from fastdeploy.http.control.weight_export import in_header, passed_on, pieces
from fastdeploy.http.openapi import asks
from fastdeploy.inter_communicator.messages import ExportAdapterArgs


class ExportBody(Body):
    """file: of the PEFT folder."""

    lora_name: LoraName
    file: Literal["adapter_config.json", "adapter_model.safetensors"] = "adapter_model.safetensors"


def adapter_export_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

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
        copy = await client.call(ExportAdapterArgs(body.lora_name))
        try:
            fd = open_regular(os.path.join(copy["path"], body.file))
        except FileNotFoundError as error:
            raise UpdateInProgress("the adapter was replaced or unloaded meanwhile: ask again") from error
        headers = {
            "Content-Length": str(os.fstat(fd).st_size),
            "X-Adapter-Epoch": str(copy["adapter_epoch"]),
            "X-Adapter-Version": in_header(copy["version"]),
            "X-Adapter-Fingerprint": copy["fingerprint"],
        }
        file = os.fdopen(fd, "rb", buffering=0)
        return StreamingResponse(pieces(file), headers=headers, media_type="application/octet-stream")

    return router
