"""Code that the dialects share: reading the fields of a control call, and the pause of a foreign client."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel

from fastdeploy.http.body import Body, parse_body, parse_json
from fastdeploy.http.body import LaxBody as LaxBody  # for all dialects
from fastdeploy.http.context import ServingContext
from fastdeploy.inter_communicator import messages as m

PAUSE_TIMEOUT_S = 60.0
# An adapter that is named here is refused rather than overlooked: the call would act on the whole engine.
CONTROL_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"lora_name": (None, "")}
# Query parameters that may be repeated, or hold a comma list.
LISTS = frozenset({"tags", "request_ids"})


Kind = TypeVar("Kind", bound=BaseModel)


async def read_fields(request: Request) -> dict[str, Any]:
    """The JSON object of the body over the query parameters. No body, and a GET with one, are fine."""
    query: dict[str, Any] = dict(request.query_params)
    for name in LISTS & query.keys():
        values = request.query_params.getlist(name)
        query[name] = [part for value in values for part in value.split(",") if part]
    return {**query, **parse_json(await request.body())}


async def read_control(request: Request, kind: type[Kind]) -> Kind:
    """The fields of :func:`read_fields` as ``kind``, null being absent. Raises InvalidField for the first wrong one."""
    fields = await read_fields(request)
    if not issubclass(kind, Body):
        fields = {k: v for k, v in fields.items() if k in kind.model_fields or k in CONTROL_UNSUPPORTED}
    return parse_body(fields, kind, CONTROL_UNSUPPORTED)


async def place_pause(context: ServingContext, mode: str, clear_cache: bool | None, placed_by: str) -> dict[str, Any]:
    """Pause as every dialect does. Requests that come during the pause are held, never refused. Requests that do not
    end in time are frozen, never aborted. Returns the report when quiesced."""
    args = m.PauseArgs(
        mode=mode,
        clear_cache=clear_cache,
        admission="hold",
        timeout_s=PAUSE_TIMEOUT_S,
        on_timeout="keep",
        placed_by=placed_by,
    )
    return await context.client.call(args)


async def resume(context: ServingContext) -> dict[str, Any]:
    """Release every anonymous hold. Named and system holds stay, and the report lists them."""
    return await context.client.call(m.ResumeArgs())


def adapters_off() -> HTTPException:
    """The 404 of routes about adapters, which clients read as a feature that is off."""
    return HTTPException(404, "this server serves no adapters: publish merged weights instead")
