"""The socket pair between a gateway and the parent that starts its replicas."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from fastdeploy.core.errors import ControlError, EngineDead
from fastdeploy.fleet.launcher import Action, Answer, Ask, LocalLauncher, ParentEnd, Placement, Placements

pytestmark = pytest.mark.anyio
ONE = Placement("replica-0", "ipc:///a", "http://127.0.0.1:1", "here")
TWO = Placement("replica-1", "ipc:///b", "http://127.0.0.1:2", "here")


class Pair:
    """Both ends. seen: the placements that the gateway got."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.parent = ParentEnd(ours)
        self.lost = asyncio.Event()
        self.launcher = LocalLauncher(theirs, self.lost.set)
        self.seen: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for placements in self.launcher.placements():
            self.seen.put_nowait(list(placements))

    async def asked(self) -> Ask:
        """Return the next message of the gateway."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.parent.fileno(), readable.set)
        try:
            while not (asks := self.parent.read()):
                readable.clear()
                await readable.wait()
        finally:
            loop.remove_reader(self.parent.fileno())
        [ask] = asks
        return ask

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.launcher.close()
        self.parent.close()


@pytest.fixture
async def pair():
    pair = Pair()
    pair.parent.send(Placements([ONE]))
    assert await pair.seen.get() == [ONE]
    yield pair
    await pair.close()


async def test_the_gateway_sees_each_change_of_the_replicas(pair):
    pair.parent.send(Placements([ONE, TWO]))
    assert await pair.seen.get() == [ONE, TWO]


async def test_each_call_waits_for_its_own_answer(pair):
    add, restart = asyncio.create_task(pair.launcher.add()), None
    first = await pair.asked()
    restart = asyncio.create_task(pair.launcher.restart("replica-0", "it was silent"))
    second = await pair.asked()
    assert first.action is Action.ADD
    assert (second.action, second.name, second.why) == (Action.RESTART, "replica-0", "it was silent")
    pair.parent.send(Answer(second.ask_id, "replica-0"))
    await restart
    assert not add.done()
    pair.parent.send(Answer(first.ask_id, "replica-7"))
    assert await add == "replica-7"


async def test_a_refusal_of_the_parent_is_an_error_of_the_call(pair):
    remove = asyncio.create_task(pair.launcher.remove("replica-9"))
    ask = await pair.asked()
    assert ask.action is Action.REMOVE
    pair.parent.send(Answer(ask.ask_id, error="name: there is no replica 'replica-9'"))
    with pytest.raises(ControlError, match="replica-9"):
        await remove


@pytest.mark.parametrize("reads", [True, False])
async def test_the_death_of_the_parent_fails_open_calls_and_is_told(pair, reads):
    add = asyncio.create_task(pair.launcher.add())
    if reads:
        await pair.asked()
    else:
        await asyncio.sleep(0)  # the call is sent
    pair.parent.close()
    async with asyncio.timeout(20):
        with pytest.raises(EngineDead):
            await add
        await pair.lost.wait()
    with pytest.raises(EngineDead):
        await pair.launcher.add()


async def test_a_message_that_cannot_be_read_is_an_error_of_the_placements(pair):
    pair.parent._link.send(b"[]\n")
    with pytest.raises(msgspec.DecodeError):
        await pair._task


def test_a_gateway_that_does_not_read_never_blocks_the_parent():
    ours, theirs = socket.socketpair()
    parent = ParentEnd(ours)
    message = Placements([ONE] * 5000)
    parent.send(message)
    assert parent.wants_to_write
    received = b""
    while parent.wants_to_write:
        received += theirs.recv(1 << 20)
        parent.flush()
    theirs.setblocking(False)
    while received[-1:] != b"\n":
        received += theirs.recv(1 << 20)
    assert received.count(b'"replica-0"') == 5000
    theirs.close()
    assert parent.read() is None
    parent.send(message)
    assert not parent.wants_to_write, "bytes for a dead gateway are kept"
    parent.close()
