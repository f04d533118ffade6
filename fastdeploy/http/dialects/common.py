"""Code that several dialects share: pauses, memory, weight sessions, SGLang's form of errors, and the description of
this server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import STATUS, AdapterFolderNotFound, FastDeployError, InvalidField
from fastdeploy.core.process import VERSION
from fastdeploy.core.weight_source import Source
from fastdeploy.http.calls import ErrorAnswer, catching
from fastdeploy.http.context import ServingContext
from fastdeploy.http.errors import error_body, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.inter_communicator import messages as m

PAUSE_TIMEOUT_S = 60.0


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


def memory_tags(tags: Iterable[str], names: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return our names of kinds of memory. names: by the names of the dialect; None = memory that this server does not
    have. Raises InvalidField."""
    for tag in tags:
        if tag not in names:
            raise InvalidField("tags", f"expected some of {', '.join(names)}, got {tag!r}")
    return tuple(dict.fromkeys(name for tag in tags if (name := names[tag]) is not None))


class OpenWeightSession:
    """The weight session of a dialect whose calls name no session, and may reach any API server: the engine knows which
    one is open. placed_by: the name of the dialect."""

    def __init__(self, client: ServingClient, placed_by: str):
        self._client, self._placed_by = client, placed_by

    async def begin(self, **fields: Any) -> dict[str, Any]:
        return await self._client.call(m.BeginUpdateArgs(**fields, placed_by=self._placed_by))

    async def add(self, source: Source, **fields: Any) -> dict[str, Any] | None:
        """Add tensors, and return the receipt. None: no session is open, and nothing was added."""
        receipt = await self._client.call(m.UpdatePartArgs(None, source, **fields, placed_by=self._placed_by))
        return None if receipt["session_id"] is None else receipt

    async def commit(self, version: str | None) -> dict[str, Any]:
        """Commit the session. Raises WrongOrder if none is open."""
        return await self._client.call(m.CommitUpdateArgs(None, version=version, placed_by=self._placed_by))


def sglang_error(message_field: str = "message", **extra: Any) -> ErrorAnswer:
    """Return what answers an error in the shape that SGLang's clients read: success false, the message in
    ``message_field``, and ``extra`` beside them.

    The status is 400. It is the error's own status where the server is at fault (500 and above), and 404 for a folder
    without an adapter, as on all routes."""

    def answer(error: FastDeployError) -> Response:
        status = STATUS.get(error.code, 500)
        is_shown = status >= 500 or isinstance(error, AdapterFolderNotFound)
        body = {"success": False, message_field: error.message, **extra, **error_body(error)}
        return json_response(body, status if is_shown else 400)

    return answer


def success(message: str, **fields: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **fields}


def add_absent_routes(
    router: APIRouter,
    reasons: Mapping[str, str],
    reason_field: str | None = None,
    access: RouteAccess = RouteAccess.CONTROL,
) -> None:
    """Add POST routes that answer 400. reasons: path -> why this server has no such route. reason_field: name of a
    further field of the reply, with the reason alone."""

    def add(path: str, why: str) -> None:
        @router.post(path)
        @access
        @catching(sglang_error(**({reason_field: why} if reason_field else {})))
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
        "enable_return_routed_experts": bool(client.model_info.get("routed_experts")),
        "weight_version": info["version"],
        "version": VERSION,
        "time": time.time(),
    }
