"""The stream of /ui: one task asks the engine for all viewers, and no viewer costs more than a few messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fastdeploy.core.errors import ServerBusy
from fastdeploy.http.ui import feed as feed_module
from fastdeploy.http.ui.feed import MAX_QUEUED, MAX_VIEWERS, Feed, FeedResponse, Viewer
from fastdeploy.inter_communicator import messages as m
from support.http_calls import in_thread, wait_until


class Engine:
    """Answers EventsArgs as the engine does. Counts from 0 after each restart."""

    def __init__(self, stack: Any, num_events: int = 1):
        self.calls: list[m.EventsArgs] = []
        self._next, self._num_events = 0, num_events
        self._stack = stack
        self.restart()

    def restart(self, boot_id: str = "boot-1") -> None:
        self._boot_id, self._next = boot_id, 0
        self._stack.engine.replies[m.EventsArgs] = self._answer

    def _answer(self, call: m.Call) -> m.Reply:
        args = call.args
        self.calls.append(args)
        self._next += self._num_events
        result = {"now": 1.0, "next": self._next, "events": [[1.0, "frozen", "r/0", {}]] * self._num_events, "lost": 0}
        result["state"] = {"boot_id": self._boot_id}
        if args.requests:
            result["requests"] = [{"name": "r/0"}]
        return m.Reply(call.call_id, result)


@contextlib.contextmanager
def watching(stack: Any) -> Iterator[Iterator[Any]]:
    """Open the stream, and give its payloads."""
    with httpx.Client(base_url=stack.server.url, timeout=20) as client, client.stream("GET", "/ui/events") as stream:
        assert stream.status_code == 200
        yield (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))


def drain(seen: queue.Queue) -> list[Any]:
    messages = []
    with contextlib.suppress(queue.Empty):
        while True:
            messages.append(seen.get_nowait())
    return [message for message in messages if isinstance(getattr(message, "args", None), m.EventsArgs)]


def test_the_engine_is_asked_only_while_somebody_looks(stack, monkeypatch):
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.01)
    engine = Engine(stack)
    stack.http.get("/ui")
    assert engine.calls == [], "the page alone asks for nothing"
    with watching(stack) as payloads:
        assert "requests" in next(payloads)
        assert "requests" not in next(payloads)
    assert engine.calls[0] == m.EventsArgs(0, True)
    assert engine.calls[1].after == 1, "later calls ask for what is new"
    wait_until(lambda: not _feed_tasks(stack))
    drain(stack.engine.seen)
    for _ in range(20):
        assert stack.http.get("/health").status_code == 200
    assert drain(stack.engine.seen) == []


def _feed_tasks(stack: Any) -> list[str]:
    """Return the tasks of the server that ask the engine for viewers."""
    loop = stack.server.client._task.get_loop()
    return [task.get_name() for task in asyncio.all_tasks(loop) if task.get_name() == "ui-feed"]


def test_all_viewers_share_one_task(stack, monkeypatch):
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.01)
    Engine(stack)
    with watching(stack) as one, watching(stack) as other:
        for payloads in (one, other):
            assert any("requests" in next(payloads) for _ in range(3)), "each viewer begins with all requests"
        assert len(_feed_tasks(stack)) == 1


def test_a_restart_of_the_engine_is_shown_and_its_events_are_counted_anew(stack, monkeypatch):
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.01)
    engine = Engine(stack)
    with watching(stack) as payloads:
        assert next(payloads)["state"]["boot_id"] == "boot-1"
        stack.engine.die()
        assert any(payload["state"] is None and payload["error"] for payload in payloads)
        stack.restart_engine(boot_id="boot-2")
        engine.restart("boot-2")
        back = next(p for p in payloads if p["state"] is not None and p["state"]["boot_id"] == "boot-2")
        assert "requests" in back


def test_a_restart_between_two_calls_is_noticed_by_the_boot_id(stack, monkeypatch):
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.01)
    engine = Engine(stack)
    with watching(stack) as payloads:
        next(payloads)
        engine.restart("boot-2")
        assert "requests" in next(p for p in payloads if p["state"]["boot_id"] == "boot-2")


def test_a_shutdown_of_the_server_ends_the_stream(stack, monkeypatch):
    Engine(stack)
    with watching(stack) as payloads:
        next(payloads)
        rest = in_thread(lambda: list(payloads))
        stack.server._server.should_exit = True
        rest.result(20)


def test_one_viewer_too_many_is_refused(make_stack, monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    stack = make_stack()
    Engine(stack)
    with watching(stack) as payloads:
        next(payloads)
        refused = stack.http.get("/ui/events")
        assert refused.status_code == 429 and "viewers" in refused.json()["error"]["message"]
    wait_until(lambda: not _feed_tasks(stack))
    with watching(stack) as payloads:
        next(payloads)


# ---------------------------------------------------------------------- without a server


class StubClient:
    """Gives 100 events to each call."""

    def __init__(self) -> None:
        self.after: list[int] = []
        self.closing = asyncio.Event()

    async def call(self, args: m.EventsArgs) -> dict[str, Any]:
        self.after.append(args.after)
        events = [[1.0, "frozen", f"r/{i}", {}] for i in range(100)]
        reply = {"now": 1.0, "next": args.after + 100, "events": events, "lost": 0, "state": {"boot_id": "b"}}
        return {**reply, "requests": []} if args.requests else reply


def joined(feed: Feed) -> Viewer:
    """Add a viewer and start no task."""
    viewer = Viewer()
    feed._viewers.add(viewer)
    return viewer


@pytest.mark.anyio
async def test_a_stalled_viewer_holds_a_few_messages_and_delays_nobody():
    feed = Feed(StubClient())
    stalled, reading = joined(feed), joined(feed)
    await feed._ask()
    first = await stalled.next()  # its connection now takes nothing for a while
    received = 0
    for i in range(100):  # 10,000 events
        if i:
            await feed._ask()
        received += events_in(await reading.next())
        assert len(reading) == 0 and len(stalled) <= MAX_QUEUED
    assert received == 100 * 100
    assert len(stalled) == 0, "a viewer that fell behind keeps nothing"
    pending = await resumed(stalled, feed)
    missed, payload = pending.split(b"\n\n", 1)
    assert missed == b"event: missed\ndata: %d" % (99 * 100)
    assert b'"requests":' in payload and b'"requests":' in first, "it begins anew, with all requests"
    assert not (await resumed(stalled, feed)).startswith(b"event: missed")


async def resumed(viewer: Viewer, feed: Feed) -> bytes:
    """Let a viewer that has read everything wait, ask the engine, and return what the viewer gets."""
    reading = asyncio.ensure_future(viewer.next())
    await asyncio.sleep(0)
    await feed._ask()
    message = await reading
    assert message is not None
    return message


def events_in(message: bytes | None) -> int:
    assert message is not None
    return len(json.loads(message[6:])["events"])


@pytest.mark.anyio
async def test_the_number_of_viewers_is_limited():
    feed = Feed(StubClient())
    for _ in range(MAX_VIEWERS):
        joined(feed)
    with pytest.raises(ServerBusy):
        feed.join()


@pytest.mark.anyio
async def test_a_page_that_never_reads_loses_its_place(monkeypatch):
    monkeypatch.setattr(feed_module, "STALL_S", 0.01)
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.01)
    feed = Feed(StubClient())

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(20):
        await FeedResponse(feed)({"type": "http"}, receive, send)
    assert not feed._viewers and feed._task is None


@pytest.mark.anyio
async def test_a_page_that_joins_during_the_shutdown_is_let_go():
    """A page that does not read may still be there then."""
    client = StubClient()
    feed = Feed(client)
    feed.join()
    client.closing.set()
    await asyncio.wait([feed._task], timeout=20)
    assert await asyncio.wait_for(feed.join().next(), 20) is None


@pytest.mark.anyio
async def test_a_fault_of_the_feed_ends_the_streams_and_the_next_page_begins_anew(monkeypatch):
    client = StubClient()
    feed = Feed(client)
    with monkeypatch.context() as broken:
        broken.setattr(feed, "_pass_on", None)
        assert await asyncio.wait_for(feed.join().next(), 20) is None
    assert isinstance(feed._task.exception(), TypeError)
    message = await asyncio.wait_for(feed.join().next(), 20)
    assert message is not None and message.startswith(b"data: ")
    feed._task.cancel()
