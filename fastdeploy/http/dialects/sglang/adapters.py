"""SGLang's adapter routes, as slime, AReaL and verl call them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody, parse_body
from fastdeploy.http.calls import Routes, catching, read_body
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import AdapterConfig, known_adapters, load_adapter, load_folder
from fastdeploy.http.control.protocol import LoraName
from fastdeploy.http.dialects.common import sglang_error
from fastdeploy.http.dialects.sglang.tensor_upload import TensorUpload, decode_tensors, require_safetensors
from fastdeploy.http.errors import json_response
from fastdeploy.http.openapi import schema_of, takes
from fastdeploy.http.upload import admitted_upload, spooled_bytes
from fastdeploy.inter_communicator import messages as m

FROM_TENSORS = "__tensor__"  # the path that SGLang shows for an adapter that came without a folder


class NameBody(LaxBody):
    lora_name: LoraName


class LoadOptions(NameBody):
    """The options of a load. pinned: has no effect, since every adapter stays usable. upsert: false refuses a name that
    is loaded. SGLang does so without this field too. Here the adapter is replaced then, as on prime-rl's server, which
    has the same route and replaces one name in each step."""

    pinned: bool = False
    upsert: bool | None = None

    @property
    def replace(self) -> bool:
        return self.upsert is not False


class LoadBody(LoadOptions):
    lora_path: str = Field(min_length=1)


class ConfigBody(LoadOptions):
    """The fields of an upload but the tensors."""

    config_dict: AdapterConfig


class AdapterTensors(TensorUpload, kw_only=True):
    """The body of an upload.

    serialized_named_tensors: the bytes of one safetensors file, repeated for each tensor-parallel rank.
    serialized_tensors: these bytes alone, as older clients send them."""

    lora_name: Any = None
    config_dict: Any = None
    serialized_named_tensors: list[bytes] = []
    serialized_tensors: bytes | None = None
    pinned: Any = None
    upsert: Any = None
    added_tokens_config: dict[str, Any] | None = None
    expected_checksums: dict[str, Any] | None = None

    def tensors(self) -> bytes:
        """Return the bytes of the safetensors file. Raises InvalidField for anything else, or for several files."""
        field, entries = "serialized_named_tensors", self.serialized_named_tensors
        if self.serialized_tensors is not None:
            field, entries = "serialized_tensors", [self.serialized_tensors, *entries]
        if len(distinct := list(dict.fromkeys(entries))) != 1:
            raise InvalidField(field, f"expected one safetensors file, repeated for each rank; got {len(distinct)}")
        require_safetensors(distinct[0], field)
        return distinct[0]


def tensors_schema() -> dict[str, Any]:
    """Return the JSON schema of an upload."""
    schema, options = schema_of(AdapterTensors), schema_of(ConfigBody)
    properties = schema["properties"] | options["properties"]
    return schema | {"properties": properties, "required": options["required"]}


def parse_tensors(raw: bytes) -> tuple[ConfigBody, bytes]:
    """Return the options and the safetensors file of an upload. Raises InvalidField. Runs on a thread, since the body
    may have gigabytes."""
    body = decode_tensors(raw, AdapterTensors)
    for field in ("added_tokens_config", "expected_checksums"):
        if getattr(body, field):
            raise InvalidField(field, "not supported by this server")
    options = {name: getattr(body, name) for name in ConfigBody.model_fields}
    return parse_body(options, ConfigBody, {}), body.tensors()


def add_routes(router: APIRouter, context: ServingContext) -> None:
    routes, errors = Routes(router, read_body), sglang_error("error_message", loaded_adapters=None)

    async def loaded() -> dict[str, Any]:
        paths = {adapter["lora_name"]: adapter["path"] for adapter in await known_adapters(context)}
        return {"success": True, "error_message": "", "loaded_adapters": paths}

    @routes.post("/load_lora_adapter", LoadBody, errors=errors)
    async def load_lora_adapter(body: LoadBody) -> dict[str, Any]:
        """Load a PEFT folder. The folder is read before the answer, and not again later."""
        await load_folder(context, body.lora_name, body.lora_path, replace=body.replace)
        return await loaded()

    @routes.post("/unload_lora_adapter", NameBody, errors=errors)
    async def unload_lora_adapter(body: NameBody) -> dict[str, Any]:
        """Remove the name. Running requests of the adapter finish."""
        await context.client.call(m.UnloadAdapterArgs(body.lora_name))
        return await loaded()

    @router.post("/load_lora_adapter_from_tensors", openapi_extra=takes(tensors_schema()))
    @catching(errors)
    async def load_lora_adapter_from_tensors(request: Request) -> Response:
        """Load the bytes of a safetensors file. A pickle is refused by its first bytes, and never loaded."""
        async with admitted_upload(context, None):
            body, tensors = await asyncio.to_thread(parse_tensors, await request.body())
            async with spooled_bytes(tensors, context) as source:
                args = m.LoadAdapterArgs(body.lora_name, source, body.config_dict, FROM_TENSORS, replace=body.replace)
                await load_adapter(context, args)
        return json_response(await loaded())
