"""Ports at which several processes listen: who gets a new connection, and who else may listen there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from fastdeploy.core.config import ServeConfig
from fastdeploy.entrypoints.ports import Port, open_ports, with_ports

NUM = 3
CONNECTIONS = 120  # of which some socket of three gets none by chance once in 10**20 tries


@pytest.fixture(params=["127.0.0.1", "::1"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    opened = Port.open(request.param, 0, NUM)
    yield opened
    opened.close()


def connect(port: Port, number: int = CONNECTIONS) -> None:
    for _ in range(number):
        socket.create_connection(port.sockets[0].getsockname()[:2], timeout=10).close()


def accepted(port: Port) -> list[int]:
    """Return how many connections wait at each socket, and accept them."""
    counts = []
    for listener in port.sockets:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                count += 1
        counts.append(count)
    return counts


def test_every_process_gets_connections_until_some_are_chosen(port):
    connect(port)
    counts = accepted(port)
    assert sum(counts) == CONNECTIONS and all(counts), counts


@pytest.mark.parametrize("chosen", [{0}, {2}, {0, 2}, {0, 1, 2}])
def test_only_the_chosen_processes_get_connections_and_each_of_them_does(port, chosen):
    port.give_to({1})
    port.give_to(chosen)
    connect(port)
    counts = accepted(port)
    assert sum(counts) == CONNECTIONS and {i for i, count in enumerate(counts) if count} == chosen, counts


def test_a_connection_waits_for_a_process_that_gets_no_others(port):
    port.give_to({1})
    connect(port, 1)
    port.give_to({0, 2})
    connect(port, 5)
    counts = accepted(port)
    assert counts[1] == 1 and counts[0] + counts[2] == 5


@pytest.mark.parametrize("num", [1, NUM])
def test_another_server_cannot_listen_at_the_port(port, num):
    with pytest.raises(
        OSError, match=rf"cannot listen on {port.sockets[0].getsockname()[0]}:{port.number}: Address al"
    ):
        Port.open(port.sockets[0].getsockname()[0], port.number, num)


def test_a_port_that_is_taken_leaves_no_other_port_open():
    with contextlib.closing(Port.open("127.0.0.1", 0)) as taken:
        config = ServeConfig(model="m", port=0, control_port=0, metrics_port=taken.number)
        with pytest.raises(OSError, match="Address already in use"):
            open_ports(config)
    first, second = open_ports(ServeConfig(model="m", port=0, control_port=0), NUM)
    config = with_ports(ServeConfig(model="m", port=0, control_port=0), [first, second])
    assert (config.port, config.control_port) == (first.number, second.number)
    for one in (first, second):
        assert len(one.sockets) == NUM
        one.close()
