"""Routes for control calls: they read fields, call the engine, and answer with a report."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError
from fastdeploy.http.body import parse_body, parse_json
from fastdeploy.http.errors import error_response, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openapi import asks, takes
from fastdeploy.http.upload import is_upload
from fastdeploy.inter_communicator.messages import Args

Kind = TypeVar("Kind", bound=BaseModel)
Reader = Callable[[Request, type[Any]], Awaitable[Any]]
Handler = Callable[[Kind], Awaitable[Any]]
Route = Callable[[Request], Awaitable[Response]]
ErrorAnswer = Callable[[FastDeployError], Response]
Neutral = Mapping[str, tuple[Any, ...]]

# Query parameters that may be repeated; those in COMMAS may also hold a list separated by commas.
LISTS = frozenset({"req_ids", "request_ids", "tags", "tensors"})
COMMAS = frozenset({"request_ids", "tags"})
# A call that names an adapter is refused, unless it has the field: it would act on the whole engine. Clients of other
# engines send "" for no adapter.
NO_ADAPTER: Neutral = {"lora_name": (None,)}
NO_ADAPTER_OR_EMPTY: Neutral = {"lora_name": (None, "")}


async def read(request: Request, kind: type[Kind]) -> Kind:
    """Read the fields of a native call: those of the query, and over them those of the JSON body. Each may be absent.
    Raises InvalidField for the first wrong field, and for an adapter's name that ``kind`` has no field for."""
    body = {} if is_upload(request) else parse_json(await request.body())
    return parse_body({**_query(request), **body}, kind, NO_ADAPTER)


async def read_fields(request: Request) -> dict[str, Any]:
    """Return the fields of the query, and over them those of the JSON body. Each may be absent."""
    return {**_query(request), **parse_json(await request.body())}


async def read_lenient(request: Request, kind: type[Kind]) -> Kind:
    """Read :func:`read_fields` as ``kind``, for a dialect. Raises InvalidField, as :func:`read`."""
    return parse_body(await read_fields(request), kind, NO_ADAPTER_OR_EMPTY)


async def read_body(request: Request, kind: type[Kind]) -> Kind:
    """Read the JSON body alone as ``kind``. Raises InvalidField for the first wrong field."""
    return parse_body(parse_json(await request.body()), kind, {})


def _query(request: Request) -> dict[str, Any]:
    query: dict[str, Any] = dict(request.query_params)
    for name in LISTS & query.keys():
        values = request.query_params.getlist(name)
        query[name] = [part for value in values for part in value.split(",") if part] if name in COMMAS else values
    return query


def envelope(result: dict[str, Any]) -> Response:
    """Return the reply of a native call."""
    return json_response(_envelope(status="success", error_message=None, result=result))


def envelope_error(error: FastDeployError) -> Response:
    """Return the reply of a native call that failed: the envelope, beside the error."""
    return error_response(error, **_envelope(status="error", error_message=error.message, result=None))


def _envelope(**fields: Any) -> dict[str, Any]:
    return {"request_id": f"control-{uuid.uuid4().hex}", **fields}


def catching(answer: ErrorAnswer) -> Callable[[Route], Route]:
    """Answer the errors of a route by ``answer``."""

    def decorate(route: Route) -> Route:
        @functools.wraps(route)
        async def run(request: Request) -> Response:
            try:
                return await route(request)
            except FastDeployError as error:
                return answer(error)

        return run

    return decorate


class Routes:
    """The routes of ``router`` whose handlers get the checked fields of a call, and return the content of the answer.
    read: one of the readers of this module. reply: makes the answer of its content. errors: makes that of an error."""

    def __init__(
        self,
        router: APIRouter,
        read: Reader = read_lenient,
        reply: Callable[[Any], Response] = json_response,
        errors: ErrorAnswer = error_response,
    ):
        self._router, self._read, self._reply, self._errors = router, read, reply, errors

    def post(
        self,
        path: str,
        kind: type[Kind],
        access: RouteAccess = RouteAccess.CONTROL,
        errors: ErrorAnswer | None = None,
    ) -> Callable[[Handler[Kind]], Handler[Kind]]:
        """Add the decorated handler of a POST route with fields of ``kind``. errors: makes the answer of an error."""
        query = self._read is not read_body
        extra = takes(kind, query=query) if kind.model_fields else None
        return lambda handler: self._add("POST", path, kind, handler, access, extra, errors or self._errors)

    def get(
        self, path: str, kind: type[Kind], access: RouteAccess = RouteAccess.CONTROL
    ) -> Callable[[Handler[Kind]], Handler[Kind]]:
        """Add the decorated handler of a GET route with fields of ``kind`` in the query."""
        return lambda handler: self._add("GET", path, kind, handler, access, asks(kind), self._errors)

    def call(self, path: str, kind: type[BaseModel], client: ServingClient, args: Callable[..., Args]) -> None:
        """Add a POST route that passes all its fields to the engine as ``args``, and answers with the report."""

        async def call(fields: BaseModel) -> dict[str, Any]:
            return await client.call(args(**fields.model_dump()))

        call.__name__ = path.rpartition("/")[2]
        self.post(path, kind)(call)

    def _add(
        self,
        method: str,
        path: str,
        kind: type[Kind],
        handler: Handler[Kind],
        access: RouteAccess,
        extra: dict[str, Any] | None,
        errors: ErrorAnswer,
    ) -> Handler[Kind]:
        @access
        @catching(errors)
        async def run(request: Request) -> Response:
            return self._reply(await handler(await self._read(request, kind)))

        about = inspect.cleandoc(handler.__doc__ or "")
        self._router.add_api_route(
            path, run, methods=[method], name=handler.__name__, description=about, openapi_extra=extra
        )
        return handler
