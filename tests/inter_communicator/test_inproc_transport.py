"""The in-process transport keeps the promises of the ZMQ one."""

from __future__ import annotations

import threading

from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.inproc_transport import InprocTransport


def test_messages_arrive_in_order_in_one_batch():
    transport = InprocTransport()
    client = transport.connect("a", lambda message: None)
    for pid in range(5):
        client.send(m.Hello(pid=pid))
    assert transport.recv(None) == [("a", m.Hello(pid=pid)) for pid in range(5)]
    assert transport.recv(0) == []
    assert transport.recv(0.01) == []


def test_a_fence_is_acknowledged_after_what_was_sent_before_it():
    transport, got = InprocTransport(), []
    transport.connect("a", got.append)
    transport.send("a", m.Outputs([]))
    assert transport.recv(0) == []
    transport.send("a", m.Fence(fence_id=3))
    assert got == [m.Outputs([])]
    assert transport.recv(0) == [("a", m.FenceAck(fence_id=3))]


def test_a_closed_client_is_gone():
    transport = InprocTransport()
    client = transport.connect("a", lambda message: None)
    assert transport.send("a", m.Goodbye())
    client.close()
    assert not transport.send("a", m.Goodbye())


def test_wake_ends_a_blocked_recv():
    transport, results = InprocTransport(), []
    thread = threading.Thread(target=lambda: results.append(transport.recv(None)))
    thread.start()
    transport.wake()
    thread.join(10)
    assert results == [[]]
