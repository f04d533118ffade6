"""Code that several dialects share: routes, pauses, SGLang's form of errors, and the description of this server."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from fastdeploy import __version__
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import STATUS, AdapterFolderNotFound, FastDeployError, InvalidField
from fastdeploy.http.body import parse_body, parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.errors import error_body, json_response
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

PAUSE_TIMEOUT_S = 60.0
# A call that names an adapter is refused: without the name it would act on the whole engine.
CONTROL_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"lora_name": (None, "")}
# Query parameters that may be repeated, or hold a list separated by commas.
LISTS = frozenset({"tags", "request_ids"})

Route = Callable[[Request], Awaitable[Response]]
Kind = TypeVar("Kind", bound=BaseModel)
Handler = Callable[[Kind], Awaitable[dict[str, Any]]]


async def read_fields(request: Request) -> dict[str, Any]:
    """Return the query parameters, with the fields of the JSON body over them. The body may be absent."""
    query: dict[str, Any] = dict(request.query_params)
    for name in LISTS & query.keys():
        values = request.query_params.getlist(name)
        query[name] = [part for value in values for part in value.split(",") if part]
    return {**query, **parse_json(await request.body())}


async def read_control(request: Request, kind: type[Kind]) -> Kind:
    """Read the fields of :func:`read_fields` as ``kind``. Null means absent. Raises InvalidField for the first wrong
    field, and for an adapter's name."""
    return parse_body(await read_fields(request), kind, CONTROL_UNSUPPORTED)


async def read_lax(request: Request, kind: type[Kind]) -> Kind:
    """Read the JSON body alone as ``kind``. Null means absent. Raises InvalidField for the first wrong field."""
    return parse_body(parse_json(await request.body()), kind, {})


class Routes:
    """Adds POST routes to ``router``. A handler takes the body, already checked, and returns the content of the reply.

    query: a field may also be in the query, and the body wins. Otherwise only the body is read, as in SGLang.
    sglang_errors: see :func:`sglang_errors`."""

    def __init__(self, router: APIRouter, *, query: bool = True, sglang_errors: bool = False):
        self._router, self._query, self._sglang_errors = router, query, sglang_errors

    def post(self, path: str, kind: type[Kind], **error_fields: Any) -> Callable[[Handler[Kind]], Handler[Kind]]:
        """Add the decorated handler of bodies of ``kind``. error_fields: see :func:`sglang_errors`."""

        def add(handler: Handler[Kind]) -> Handler[Kind]:
            async def run(request: Request) -> Response:
                read = read_control if self._query else read_lax
                return json_response(await handler(await read(request, kind)))

            self._router.post(
                path,
                name=handler.__name__,
                description=inspect.cleandoc(handler.__doc__ or ""),
                openapi_extra=takes(kind, query=self._query) if kind.model_fields else None,
            )(sglang_errors(**error_fields)(run) if self._sglang_errors else run)
            return handler

        return add


async def place_pause(
    client: ServingClient, mode: str, clear_cache: bool | None, placed_by: str, ttl_s: float, hold_id: str | None = None
) -> dict[str, Any]:
    """Pause the engine and return the report once it is quiesced. See PauseArgs for the arguments.

    Requests that arrive during the pause are held, never refused. Requests that do not end within PAUSE_TIMEOUT_S are
    frozen, never aborted."""
    args = m.PauseArgs(
        mode, clear_cache, "hold", PAUSE_TIMEOUT_S, on_timeout="keep", ttl_s=ttl_s, hold_id=hold_id, placed_by=placed_by
    )
    return await client.call(args)


async def resume(client: ServingClient) -> dict[str, Any]:
    """Release every anonymous hold. Named and system holds stay, and the report lists them."""
    return await client.call(m.ResumeArgs())


def sglang_errors(message_field: str = "message", **extra: Any) -> Callable[[Route], Route]:
    """Answer a FastDeployError in the shape that SGLang's clients read: success false, the message in
    ``message_field``, and ``extra`` beside them.

    The status is 400. It is the error's own status where the server is at fault (500 and above), and 404 for a folder
    without an adapter, as on all routes."""

    def decorate(route: Route) -> Route:
        @functools.wraps(route)
        async def run(request: Request) -> Response:
            try:
                return await route(request)
            except FastDeployError as error:
                status = STATUS.get(error.code, 500)
                told = status >= 500 or isinstance(error, AdapterFolderNotFound)
                body = {"success": False, message_field: error.message, **extra, **error_body(error)}
                return json_response(body, status if told else 400)

        return run

    return decorate


def success(message: str, **fields: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **fields}


def add_absent_routes(router: APIRouter, reasons: Mapping[str, str], reason_field: str | None = None) -> None:
    """Add POST routes that answer 400. reasons: path -> why this server has no such route. reason_field: name of a
    further field of the reply, with the reason alone."""

    def add(path: str, why: str) -> None:
        @router.post(path)
        @sglang_errors(**({reason_field: why} if reason_field else {}))
        async def refuse(request: Request) -> Response:
            raise InvalidField(path.removeprefix("/"), why)

    for path, why in reasons.items():
        add(path, why)


def model_fields(context: ServingContext) -> dict[str, Any]:
    """Return SGLang's fields about the model."""
    config = context.config
    return {
        "model_path": config.model,
        "served_model_name": config.served_model_name,
        "tokenizer_path": config.model if context.tokenizer is not None else None,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


async def server_arguments(context: ServingContext, request: Request) -> dict[str, Any]:
    """Return the content of SGLang's /server_info: the settings of this server and the shape of its deployment, which
    is one replica on one device."""
    client, config = context.client, context.config
    host, port = request.scope.get("server") or (config.host, config.port)
    info = await client.call(m.WeightInfoArgs())
    return {
        **msgspec.to_builtins(config),
        **await client.call(m.ModelInfoArgs()),
        **model_fields(context),
        "host": host,
        "port": port,
        **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "num_gpus", "nnodes", "gpu_id_step"), 1),
        **dict.fromkeys(("node_rank", "base_gpu_id"), 0),
        "disaggregation_mode": "null",
        "enable_lora": True,
        "max_loras_per_batch": client.model_info.get("max_num_seqs"),
        "max_loaded_loras": None,  # not limited
        # slime compares these with its own settings before it takes an engine that it has not started.
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "weight_version": info["version"],
        "version": __version__,
        "time": time.time(),
    }
