"""The engine's socket: order, disconnected clients, wake-ups, malformed messages."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
import time

import msgspec
import pytest
import zmq

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnection, ZmqRouterTransport


@pytest.fixture
def endpoint():
    path = ipc_dir.create()
    yield ipc_dir.endpoint(path)
    ipc_dir.remove(path)
    assert not os.path.exists(path)


@pytest.fixture
def router(endpoint):
    transport = ZmqRouterTransport(endpoint)
    yield transport
    transport.close()


def dealer(endpoint: str, identity: bytes) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    return socket


def recv_all(router: ZmqRouterTransport, count: int) -> list:
    messages, deadline = [], time.monotonic() + 30
    while len(messages) < count:
        messages += router.recv(1.0)
        assert time.monotonic() < deadline, "timed out"
    return messages


def test_socket_folder_is_private():
    path = ipc_dir.create()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    ipc_dir.remove(path)
    assert not os.path.exists(path)
    ipc_dir.remove(path)


async def test_recv_returns_all_messages_of_a_client_in_order(endpoint, router):
    connection = ZmqConnection(zmq.Context.instance(), endpoint)
    for pid in range(100):
        connection.send(m.Hello(pid=pid))
    messages = await asyncio.to_thread(recv_all, router, 100)
    assert [message.pid for _, message in messages] == list(range(100))
    assert {client for client, _ in messages} == {connection.identity}
    connection.close()


def test_a_malformed_message_is_dropped_and_logged_with_its_client(endpoint, router, caplog):
    socket = dealer(endpoint, b"stranger")
    with caplog.at_level(logging.ERROR):
        socket.send(b"\xc1 not msgpack")
        socket.send(b"\x81\xa4type\xa5Wrong")
        socket.send_multipart([b"", b""])
        socket.send(b"\x82\xa4type\xa5Hello\xa3pid\x07")
        assert recv_all(router, 1) == [("stranger", m.Hello(pid=7))]
    assert caplog.text.count("'stranger'") == 3
    socket.close()


def test_the_report_of_a_message_of_the_wrong_type_names_the_waiting_call_or_request(endpoint, router):
    socket = dealer(endpoint, b"a")
    encode = msgspec.msgpack.encode
    socket.send(encode(m.Call(4, m.PauseArgs(timeout_s="soon"))))
    socket.send(encode(AddRequest("r", ["no token"], SamplingParams())))
    socket.send(encode(m.CancelRequest("r", "all")))  # nobody waits for an answer
    socket.send(encode(m.Hello(pid=7)))
    call, add, hello = [message for _, message in recv_all(router, 3)]
    assert (call.call_id, call.request_id, add.call_id, add.request_id) == (4, None, None, "r")
    assert "timeout_s" in call.why and "prompt_token_ids" in add.why and hello == m.Hello(pid=7)
    socket.close()


def test_a_send_to_a_disconnected_client_returns_false(endpoint, router):
    socket = dealer(endpoint, b"short-lived")
    socket.send(b"\x82\xa4type\xa5Hello\xa3pid\x07")
    recv_all(router, 1)
    assert router.send("short-lived", m.Goodbye())
    socket.close()
    deadline = time.monotonic() + 30
    while router.send("short-lived", m.Goodbye()):
        assert time.monotonic() < deadline
        router.recv(0.01)
    assert not router.send("never-seen", m.Goodbye())


def test_wake_ends_a_blocked_recv_and_is_not_lost_when_it_comes_first(router):
    results = []
    thread = threading.Thread(target=lambda: results.append(router.recv(None)))
    thread.start()
    router.wake()
    thread.join(30)
    assert not thread.is_alive() and results == [[]]
    router.wake()
    assert router.recv(None) == []


async def test_messages_sent_just_before_the_socket_closed_are_delivered(endpoint):
    router = ZmqRouterTransport(endpoint)
    connection = ZmqConnection(zmq.Context.instance(), endpoint)
    connection.send(m.Hello(pid=1))
    [(client, _)] = await asyncio.to_thread(recv_all, router, 1)
    for i in range(500):
        router.send(client, m.Fence(fence_id=i))
    router.close()
    async with asyncio.timeout(30):
        got = [message.fence_id async for message in connection.messages()]
    assert got == list(range(500))
    connection.close()


def test_every_connection_has_an_identity_of_its_own(endpoint):
    async def identities():
        connections = [ZmqConnection(zmq.Context.instance(), endpoint) for _ in range(3)]
        for connection in connections:
            connection.close()
        return {connection.identity for connection in connections}

    assert len(asyncio.run(identities())) == 3


def test_a_wake_after_the_close_touches_no_other_file(endpoint):
    transport = ZmqRouterTransport(endpoint)
    transport.close()
    reader, writer = os.pipe()  # would get the number of a closed descriptor
    transport.wake()  # as a second stop signal does
    os.close(writer)
    assert os.read(reader, 8) == b""
    os.close(reader)
