"""The transport within one process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fastdeploy.core.errors import EngineDead
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import InprocTransport


async def test_messages_arrive_in_order_in_one_batch():
    transport = InprocTransport()
    client = transport.connect()
    for pid in range(5):
        client.send(m.Hello(pid=pid))
    assert transport.recv(None) == [(client.identity, m.Hello(pid=pid)) for pid in range(5)]
    assert transport.recv(0) == []
    assert transport.recv(0.01) == []


async def test_a_client_gets_all_messages_of_another_thread_in_order_and_then_the_error():
    count = 2000

    transport, got = InprocTransport(), []
    client = transport.connect()

    def engine() -> None:
        for fence_id in range(count):
            transport.send(client.identity, m.Fence(fence_id))
        transport.close(EngineDead("over"))

    thread = threading.Thread(target=engine)
    thread.start()
    with pytest.raises(EngineDead, match="over"):
        async with asyncio.timeout(20):
            async for message in client.messages():
                got.append(message)
    thread.join()
    assert got == [m.Fence(fence_id) for fence_id in range(count)]
    assert transport.connect() is None, "the engine has ended for ever"


async def test_a_message_to_a_closed_client_is_not_sent():
    transport = InprocTransport()
    client = transport.connect()
    assert transport.send(client.identity, m.Goodbye())
    client.close()
    assert not transport.send(client.identity, m.Goodbye())


def test_wake_ends_a_blocked_recv():
    transport, results = InprocTransport(), []
    thread = threading.Thread(target=lambda: results.append(transport.recv(None)))
    thread.start()
    transport.wake()
    thread.join(30)
    assert results == [[]]
