"""GET /ui: a page that shows the engine live, and the events that the page reads.

The page loads nothing from other hosts. Its buttons call the routes of fastdeploy/http/control.

One task asks the engine for all viewers of this process, four times a second (a large fleet less often), and only while
there is a viewer. Each viewer has a short queue. A viewer that does not read loses what comes, learns how much, and
goes on with all requests anew. Nobody waits for such a viewer.

A gateway has a feed for each replica that is viewed, and one for viewers that name none: it shows all members as one
engine. Each message of a gateway lists all replicas too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError, InvalidField, ServerBusy
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.errors import error_response
from fastdeploy.http.guards.connection_limits import client_left
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.ui.sources import EngineSource, FleetSource, Source

PERIOD_S = 0.25
MAX_ENGINES = 16  # that are asked so often. More are asked less often, for the same cost
MAX_VIEWERS = 32
MAX_QUEUED = 8  # messages of one viewer
OF_REPLICA = ("name", "url", "state", "why", "version", "weight_epoch", "in_flight", "load")  # see Replica.describe
STALL_S = 30.0  # after which a viewer that does not read is disconnected
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
FOLDER = Path(__file__).parent
FILES = {"page.css": "text/css", **dict.fromkeys(("page.js", "server.js", "timeline.js"), "text/javascript")}
PAGE_HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
MAX_SERVERS = 16


class Viewer:
    """A page that reads the feed. wants_requests: the next message must have all live requests."""

    def __init__(self) -> None:
        self.wants_requests = True
        self._queue: deque[tuple[bytes, int]] = deque()
        self._behind = False
        self._missed = 0
        self._ready = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: bytes, num_events: int) -> None:
        """Queue a message with so many events. A full queue is emptied, and the viewer gets nothing until it reads."""
        if len(self._queue) >= MAX_QUEUED:
            self._missed += sum(number for _, number in self._queue)
            self._queue.clear()
            self._behind = True
        if self._behind:
            self._missed += num_events
        else:
            self._queue.append((message, num_events))
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def next(self) -> bytes | None:
        """Return the next message. None: the stream ends."""
        while not self._queue and not self._closed:
            if self._behind:
                self._behind, self.wants_requests = False, True
            self._ready.clear()
            await self._ready.wait()
        if self._closed:
            return None
        message, _ = self._queue.popleft()
        missed, self._missed = self._missed, 0
        return b"event: missed\ndata: %d\n\n%b" % (missed, message) if missed else message


class Feed:
    """The viewers of one process and one source, and the task that asks the source for them. replica: name of the
    replica to show; "" = the only engine, or all members of the fleet."""

    def __init__(self, client: ServingClient, replica: str = ""):
        self._client = client
        self._fleet = client.membership if isinstance(client, FleetClient) else None
        self._replica = replica
        self._source: Source = EngineSource(client, replica)
        if isinstance(client, FleetClient) and not replica:
            self._source = FleetSource(client)
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None

    def join(self) -> Viewer:
        """Add a viewer. Raises ServerBusy if there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise ServerBusy(f"{MAX_VIEWERS} viewers of /ui are connected already, which is the most")
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="ui-feed")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer. The task ends with the last one."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        """Ask until the last viewer leaves or the server shuts down. Then all streams end, as after a fault of ours."""
        self._begin_anew()
        closing = self._client.closing
        try:
            while not closing.is_set():
                await self._ask()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S * max(1.0, self._source.num_engines / MAX_ENGINES)):
                        await closing.wait()
        finally:
            for viewer in self._viewers:
                viewer.close()

    async def _ask(self) -> None:
        """Ask the source once, and pass on its answer."""
        try:
            reply = await self._source.read(any(viewer.wants_requests for viewer in self._viewers))
        except FastDeployError as error:
            self._begin_anew()
            self._pass_on({"state": None, "error": error.message, "events": [], **self._replicas()})
            return
        if reply.pop("anew", False):
            self._want_requests()
        self._pass_on(reply | self._replicas())

    def _replicas(self) -> dict[str, Any]:
        """Return what a message of a gateway says about all replicas."""
        if self._fleet is None:
            return {}
        entries = [replica.describe() for replica in self._fleet.replicas.values()]
        listed = [{name: entry[name] for name in OF_REPLICA} for entry in entries]
        return {"replica": self._replica, "replicas": listed}

    def _begin_anew(self) -> None:
        """Expect another engine: its events are counted from 0, and its requests are others."""
        self._source.begin_anew()
        self._want_requests()

    def _want_requests(self) -> None:
        for viewer in self._viewers:
            viewer.wants_requests = True

    def _pass_on(self, reply: dict[str, Any]) -> None:
        number = len(reply["events"])
        whole = _event(reply)
        part = (
            whole
            if reply.get("lost") and "requests" in reply
            else _event({k: v for k, v in reply.items() if k != "requests"})
        )
        for viewer in self._viewers:
            if viewer.wants_requests and "requests" in reply:
                viewer.wants_requests = False
                viewer.put(whole, number)
            else:
                viewer.put(part, number)


class FeedResponse(Response):
    """The response that streams the feed until the page disconnects, does not read for STALL_S seconds, or the server
    shuts down."""

    def __init__(self, feed: Feed):
        self._feed = feed
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            viewer = self._feed.join()
        except ServerBusy as error:
            await error_response(error)(scope, receive, send)
            return
        watch = asyncio.create_task(_watch(scope, receive, viewer))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            with contextlib.suppress(TimeoutError):  # then nothing more is sent: that would wait for the page again
                more = True
                while more:
                    message = await viewer.next()
                    more = message is not None
                    async with asyncio.timeout(STALL_S):
                        await send({"type": "http.response.body", "body": message or b"", "more_body": more})
        finally:
            self._feed.leave(viewer)
            watch.cancel()


async def _watch(scope: Scope, receive: Receive, viewer: Viewer) -> None:
    await client_left(scope, receive)
    viewer.close()


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


# ------------------------------------------------------------------ routes


def ui_router(client: ServingClient) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    feeds = {"": Feed(client)}
    page = (FOLDER / "index.html").read_bytes()

    @router.get("/ui")
    @RouteAccess.OPEN
    async def ui(request: Request) -> Response:
        """Answer the page. server: the origin of another server that the page shows too; may be repeated."""
        servers = request.query_params.getlist("server")
        if len(servers) > MAX_SERVERS or not all(ORIGIN.fullmatch(server) for server in servers):
            raise InvalidField("server", f"expected at most {MAX_SERVERS} origins such as http://10.0.0.2:8180")
        headers = {**PAGE_HEADERS, "Content-Security-Policy": content_policy(servers)}
        return Response(page, headers=headers, media_type="text/html")

    @router.get("/ui/events")
    @RouteAccess.WATCH
    async def events(request: Request) -> Response:
        """Stream what happens. replica: of a fleet, the one to show; without it all."""
        name = request.query_params.get("replica", "")
        if name:
            if not isinstance(client, FleetClient):
                raise InvalidField("replica", "this server is not the gateway of a fleet")
            client.membership.find(name)
            feeds.setdefault(name, Feed(client, name))
        return FeedResponse(feeds[name])

    for name, media_type in FILES.items():
        _add_file(router, name, media_type)
    return router


def content_policy(servers: list[str]) -> str:
    """Return the Content-Security-Policy of the page: files and calls of this server only, and calls to ``servers``."""
    connect = " ".join(["connect-src 'self'", *servers])
    rest = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; {connect}; {rest}"


def _add_file(router: APIRouter, name: str, media_type: str) -> None:
    content = (FOLDER / name).read_bytes()

    @router.get(f"/ui/{name}")
    @RouteAccess.OPEN
    async def file() -> Response:
        return Response(content, headers=PAGE_HEADERS, media_type=media_type)
