"""vLLM's adapter routes, as TRL, AReaL and SkyRL call them. Their answers are texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from fastdeploy.core.errors import STATUS, AdapterFolderNotFound, AdapterLoaded, FastDeployError, InvalidField
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import load_adapter
from fastdeploy.http.control.protocol import Kv, LoraName, Version
from fastdeploy.http.dialects.common import read_lax
from fastdeploy.http.errors import error_body, error_response, json_response
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

Kind = TypeVar("Kind", bound=BaseModel)


class LoadBody(LaxBody):
    """load_inplace: true replaces an adapter that is loaded. version and kv are fields of our own."""

    lora_name: LoraName
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False
    version: Version | None = None
    kv: Kv = "keep"


class UnloadBody(LaxBody):
    lora_name: LoraName


def add_routes(router: APIRouter, context: ServingContext) -> None:
    async def load(body: LoadBody) -> str:
        """Load a PEFT folder. The folder is read before the answer, and not again later."""
        source, path = FolderSource(body.lora_path), body.lora_path
        args = m.LoadAdapterArgs(
            body.lora_name, source, path=path, version=body.version, kv=body.kv, replace=body.load_inplace
        )
        await load_adapter(context, args)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def unload(body: UnloadBody) -> str:
        """Remove the name. Running requests of the adapter finish."""
        await context.client.call(m.UnloadAdapterArgs(body.lora_name))
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    _post(router, "/v1/load_lora_adapter", LoadBody, load)
    _post(router, "/v1/unload_lora_adapter", UnloadBody, unload)


def _post(router: APIRouter, path: str, kind: type[Kind], handler: Callable[[Kind], Awaitable[str]]) -> None:
    """Add a route that answers with a text, or with an error that has vLLM's type."""

    async def run(request: Request) -> Response:
        try:
            return PlainTextResponse(await handler(await read_lax(request, kind)))
        except FastDeployError as error:
            return _error_response(error)

    name = path.rpartition("/")[2]
    router.post(path, name=name, description=handler.__doc__, openapi_extra=takes(kind))(run)


def _error_response(error: FastDeployError) -> Response:
    """Return an error with the type that vLLM gives it. Its code is that of all routes, and so is its status, but for a
    folder without an adapter: TRL takes a 404 of the load for a server that has no such route."""
    status = 400 if isinstance(error, AdapterFolderNotFound) else STATUS.get(error.code, 500)
    if status not in (400, 404):
        return error_response(error)
    body = error_body(error)
    body["error"]["type"] = "NotFoundError" if status == 404 else "BadRequestError"
    if isinstance(error, InvalidField | AdapterLoaded):
        body["error"]["type"] = "InvalidUserInput"
    return json_response(body, status)
