"""GET /v1/replicas and /v1/replicas/targets; POST /v1/replicas/add, /drain, /undrain, /remove and /roll.

These POST routes are answered by the gateway of a fleet only.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from fastdeploy.core.errors import ControlError, EngineError
from fastdeploy.core.process import host_id, log_name
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.launcher import Placement
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.replica import ReplicaState, describe
from fastdeploy.http.body import Body
from fastdeploy.http.calls import envelope, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.protocol import Seconds
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openapi import takes
from fastdeploy.inter_communicator import messages as m

ALONE = "self"  # name of a server that belongs to no fleet


class ReplicaBody(Body):
    name: str = Field(min_length=1, max_length=200)


class DrainBody(ReplicaBody):
    """The replica to drain. timeout_s: how long to wait for its requests."""

    timeout_s: Seconds = 60.0


class RemoveBody(ReplicaBody):
    """The replica to remove. drain_s: how long it may finish its requests, which then go on elsewhere; none = as the
    gateway is configured."""

    drain_s: float | None = Field(None, ge=0, le=86400)


class RollBody(Body):
    """A rolling change. settings: flags by name, without dashes in front, as text; the others stay. drain_s: how long
    each replica may finish its requests, which then go on elsewhere."""

    settings: dict[str, str] = Field({}, max_length=200)
    drain_s: float = Field(30.0, ge=0, le=86400)


def fleet_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    def membership() -> Membership:
        if not isinstance(context.client, FleetClient):
            raise ControlError("this server is not the gateway of a fleet: it has one replica, itself")
        return context.client.membership

    async def operate(args: m.ReplicaArgs) -> dict[str, Any]:
        membership()  # raises for a server that is no gateway
        return await context.client.call(args)

    @router.get("/v1/replicas")
    @RouteAccess.DATA
    async def replicas(request: Request) -> Response:
        """List the replicas: name, url, host, state, the reason of the state, version and weight epoch, load, and
        holds. Load and holds are as of a replica's last report, which a gateway has a few times in lease_s. "roll" is
        the last rolling change."""
        fleet = context.client.membership if isinstance(context.client, FleetClient) else None
        roll = msgspec.to_builtins(fleet.roll) if fleet is not None and fleet.roll is not None else None
        return json_response({"replicas": await entries_of(context, request), "roll": roll})

    @router.get("/v1/replicas/targets")
    @RouteAccess.DATA
    async def targets(request: Request) -> Response:
        """List the replicas' own servers for Prometheus (http_sd_configs)."""
        entries = [(urlsplit(entry["url"]), entry["name"]) for entry in await entries_of(context, request)]
        return json_response(
            [{"targets": [url.netloc], "labels": {"replica": name, "__scheme__": url.scheme}} for url, name in entries]
        )

    @router.post("/v1/replicas/add")
    async def add() -> Response:
        """Start one more replica. The answer has its name; the replica joins when it is ready."""
        return envelope(await operate(m.ReplicaArgs("add")))

    @router.post("/v1/replicas/drain", openapi_extra=takes(DrainBody, query=True))
    async def drain(request: Request) -> Response:
        """Send no new request to the replica. The answer comes when nothing runs there, or after timeout_s; then
        ``in_flight`` is above 0, and the replica goes on draining."""
        body = await read(request, DrainBody)
        return envelope(await operate(m.ReplicaArgs("drain", body.name, body.timeout_s)))

    @router.post("/v1/replicas/undrain", openapi_extra=takes(ReplicaBody, query=True))
    async def undrain(request: Request) -> Response:
        """Send new requests to the replica again."""
        body = await read(request, ReplicaBody)
        return envelope(await operate(m.ReplicaArgs("undrain", body.name)))

    @router.post("/v1/replicas/remove", openapi_extra=takes(RemoveBody, query=True))
    async def remove(request: Request) -> Response:
        """Drain the replica, and end it for good. Its name is not used again."""
        body = await read(request, RemoveBody)
        return envelope(await operate(m.ReplicaArgs("remove", body.name, body.drain_s)))

    @router.post("/v1/replicas/roll", openapi_extra=takes(RollBody, query=True))
    async def roll(request: Request) -> Response:
        """Begin a rolling change: start every process of the fleet again with these settings, one at a time. The answer
        comes at once; "roll" of GET /v1/replicas shows how far it is."""
        body = await read(request, RollBody)
        given = {name.replace("-", "_"): value for name, value in body.settings.items()}
        return envelope(msgspec.to_builtins(await membership().begin_roll(given, body.drain_s)))

    return router


async def entries_of(context: ServingContext, request: Request) -> list[dict[str, Any]]:
    """Return an entry for each replica, as Replica.describe makes them."""
    if isinstance(context.client, FleetClient):
        return await context.client.leader_calls.describe_replicas()
    itself = Placement(log_name() or ALONE, "", str(request.base_url).rstrip("/"), host_id())
    try:
        return [describe(itself, ReplicaState.MEMBER, "", await context.client.call(m.FleetStateArgs()))]
    except EngineError as error:
        return [describe(itself, ReplicaState.STARTING, error.message, {})]
