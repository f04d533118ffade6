"""Server-sent events for the viewers of /ui.

One task asks the engine for all viewers of this process, four times a second, and only while there is a viewer. Each
viewer has a short queue. A viewer that does not read loses what comes, is told how much, and goes on with all requests
anew. Nobody waits for such a viewer.

A gateway has a feed for each replica that is viewed, and one for viewers that name none. Each message then lists all
replicas too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import EngineDead, FastDeployError, ServerBusy
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.membership import Membership
from fastdeploy.http.errors import error_response
from fastdeploy.inter_communicator.messages import EventsArgs

PERIOD_S = 0.25
MAX_VIEWERS = 32
MAX_QUEUED = 8  # messages of one viewer
OF_REPLICA = ("name", "url", "state", "why", "version", "weight_epoch", "in_flight", "load")  # see Replica.describe
STALL_S = 30.0  # after which a viewer that does not read is disconnected
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Viewer:
    """One page. wants_requests: the next message must have all live requests."""

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
    """The viewers of one process and one engine, and the task that asks the engine for them. replica: name of the
    engine's replica; "" = the only engine, or any member of the fleet."""

    def __init__(self, client: ServingClient, replica: str = ""):
        self._client = client
        self._fleet = client.membership if isinstance(client, FleetClient) else None
        self._replica = replica
        self._shown = replica  # by a gateway
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._boot_id = ""
        self._after = 0

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
                    async with asyncio.timeout(PERIOD_S):
                        await closing.wait()
        finally:
            for viewer in self._viewers:
                viewer.close()

    async def _ask(self) -> None:
        """Ask the engine once, and pass on its answer."""
        whole = any(viewer.wants_requests for viewer in self._viewers)
        engine: ServingClient | None = self._client if self._fleet is None else self._choose(self._fleet)
        try:
            if engine is None:
                raise EngineDead("no replica is a member of the fleet yet")
            reply = await engine.call(EventsArgs(self._after, whole))
        except FastDeployError as error:
            self._begin_anew()
            self._pass_on({"state": None, "error": error.message, "events": [], **self._replicas()})
            return
        boot_id = reply["state"]["boot_id"]
        if self._boot_id not in ("", boot_id):  # another engine, whose events are counted from 0
            self._begin_anew()
            await self._ask()
            return
        self._boot_id, self._after = boot_id, reply.pop("next")
        self._pass_on(reply | self._replicas())

    def _choose(self, fleet: Membership) -> EngineClient | None:
        """Return the client of the replica to show. Without a name, the same member as long as there is one."""
        shown = fleet.replicas.get(self._shown)
        if not self._replica and (shown is None or not shown.in_quorum):
            shown = next(iter(fleet.quorum), None)
            self._shown = "" if shown is None else shown.name
        return None if shown is None else shown.client

    def _replicas(self) -> dict[str, Any]:
        """Return what a message of a gateway says about all replicas."""
        if self._fleet is None:
            return {}
        listed = [{name: entry[name] for name in OF_REPLICA} for entry in self._fleet.describe()]
        return {"replica": self._shown, "replicas": listed}

    def _begin_anew(self) -> None:
        """Expect another engine: its events are counted from 0, and its requests are others."""
        self._boot_id, self._after = "", 0
        for viewer in self._viewers:
            viewer.wants_requests = True

    def _pass_on(self, reply: dict[str, Any]) -> None:
        number = len(reply["events"])
        whole = _event(reply)
        part = whole if reply.get("lost") else _event({k: v for k, v in reply.items() if k != "requests"})
        for viewer in self._viewers:
            if viewer.wants_requests and "requests" in reply:
                viewer.wants_requests = False
                viewer.put(whole, number)
            else:
                viewer.put(part, number)


class FeedResponse(Response):
    """Streams the feed until the page disconnects, does not read for STALL_S seconds, or the server shuts down."""

    def __init__(self, feed: Feed):
        self._feed = feed
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            viewer = self._feed.join()
        except ServerBusy as error:
            await error_response(error)(scope, receive, send)
            return
        watch = asyncio.create_task(_watch(receive, viewer))
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


async def _watch(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.close()


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
