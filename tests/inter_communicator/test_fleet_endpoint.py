"""The engine's second address: who may connect, what the others are told, and what bytes of the network can do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineDead, InvalidField
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import connection_limit, ipc_dir, zmq_transport
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, guard_client, pop_fleet_key
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, ZmqRouterTransport

SECRET, OTHER = "s" * 40, "o" * 40


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(zmq_transport, "RETRY_S", 0.05)


class Engine:
    """Answers each Hello with a Welcome, and each call with {}. received: all messages. local: the unix socket."""

    def __init__(self, folder: str, fleet_endpoint: str):
        self.local = ipc_dir.endpoint(folder)
        self.transport = ZmqRouterTransport(self.local, fleet_endpoint, SECRET)
        self.fleet = self.transport.fleet_endpoint
        self.received: list[object] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            for client, message in self.transport.recv(None):
                self.received.append(message)
                if isinstance(message, m.Hello):
                    self.transport.send(client, m.Welcome("boot", message.pid, 64))
                elif isinstance(message, m.Call):
                    self.transport.send(client, m.Reply(message.call_id, {}))

    def close(self) -> None:
        self._ended.set()
        self.transport.wake()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.transport.close()


@contextlib.contextmanager
def listening(fleet_endpoint: str = "tcp://127.0.0.1:0") -> Iterator[Engine]:
    folder = ipc_dir.create()
    engine = Engine(folder, fleet_endpoint)
    try:
        yield engine
    finally:
        engine.close()
        ipc_dir.remove(folder)


@contextlib.asynccontextmanager
async def connected(endpoint: str, secret: str | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(ZmqConnector(endpoint, secret), kills_stalled=False)
    client.start()
    try:
        async with asyncio.timeout(20):
            await client.connected.wait()
        yield client
    finally:
        await client.close()


async def why_not(endpoint: str, secret: str = SECRET) -> str:
    """Return the error that ends a connection to ``endpoint``."""
    connector = ZmqConnector(endpoint, secret)
    connection = connector.connect()
    connection.send(m.Hello(1))
    try:
        with pytest.raises(EngineDead) as error:
            async with asyncio.timeout(20):
                async for message in connection.messages():
                    raise AssertionError(message)
        return error.value.message
    finally:
        connection.close()
        connector.close()


async def test_gateways_connect_with_the_key_over_tcp_and_api_servers_without_one_over_the_unix_socket():
    with listening() as engine:
        assert engine.fleet.startswith("tcp://127.0.0.1:") and not engine.fleet.endswith(":0")
        async with connected(engine.fleet, SECRET) as gateway, connected(engine.local) as server:
            assert gateway.welcome.boot_id == server.welcome.boot_id == "boot"
            assert await gateway.call(m.PauseStatusArgs()) == {}


async def test_an_engine_listens_on_a_second_unix_socket_without_a_key(tmp_path):
    with listening(f"ipc://{tmp_path}/fleet.sock") as engine:
        assert engine.fleet == f"ipc://{tmp_path}/fleet.sock"
        async with connected(engine.fleet) as gateway:
            assert gateway.welcome.boot_id == "boot"


async def test_a_wrong_key_is_refused_and_the_error_names_the_setting():
    with listening() as engine:
        why = await why_not(engine.fleet, OTHER)
        assert engine.fleet in why and FLEET_KEY in why
        assert engine.received == []


async def test_a_client_that_speaks_without_keys_reaches_nothing():
    with listening() as engine:
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        monitor = plain.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        plain.connect(engine.fleet)
        await plain.send(msgspec.msgpack.encode(m.Hello(1)))
        async with asyncio.timeout(30):
            await monitor.recv_multipart()
        assert engine.received == []
        context.destroy(linger=0)


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


async def test_an_engine_that_cannot_be_reached_is_named_by_its_address(nobody):
    assert await why_not(nobody) == f"the engine at {nobody} cannot be reached"


async def test_requests_name_the_address_of_an_engine_that_cannot_be_reached(nobody):
    client = EngineClient(ZmqConnector(nobody, SECRET), first_connection_s=0.0)
    client.start()
    async with asyncio.timeout(20):
        while nobody not in client.missing_because:
            await asyncio.sleep(0.02)
    with pytest.raises(EngineDead, match=f"{nobody} cannot be reached"):
        await client.require_engine()
    await client.close()


async def test_a_peer_that_accepts_and_says_nothing_ends_the_connection(monkeypatch):
    monkeypatch.setattr(zmq_transport, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        assert endpoint in await why_not(endpoint)


async def test_an_engine_that_goes_away_is_lost_after_its_last_message():
    with listening() as engine:
        connector = ZmqConnector(engine.fleet, SECRET)
        connection = connector.connect()
        connection.send(m.Hello(1))
        messages = connection.messages()
        async with asyncio.timeout(20):
            assert (await anext(messages)).boot_id == "boot"
            engine.close()
            with pytest.raises(EngineDead, match=f"{engine.fleet} was lost"):
                await anext(messages)
        connection.close()
        connector.close()


@pytest.mark.parametrize("secret", ["short", "s" * 31, "s" * 32 + " ", "s" * 2000, "ü" * 40])
def test_a_key_that_is_too_short_or_not_printable_is_refused_and_not_repeated(secret):
    environment = {FLEET_KEY: secret, "OTHER": "1"}
    with pytest.raises(InvalidField) as info:
        pop_fleet_key(environment)
    assert info.value.field == FLEET_KEY and secret not in info.value.message and environment == {"OTHER": "1"}


def test_the_key_is_taken_out_of_the_environment():
    environment = {FLEET_KEY: SECRET}
    assert pop_fleet_key(environment) == SECRET and environment == {}
    assert pop_fleet_key({}) is None and pop_fleet_key({FLEET_KEY: ""}) is None


def test_tcp_without_a_key_is_refused_at_both_ends(tmp_path):
    with pytest.raises(InvalidField, match=FLEET_KEY):
        ZmqRouterTransport(f"ipc://{tmp_path}/a.sock", "tcp://127.0.0.1:0")
    with pytest.raises(InvalidField, match=FLEET_KEY):
        ZmqConnector("tcp://127.0.0.1:1")


def deep(depth: int) -> bytes:
    """A LoadAdapterArgs call whose config is nested so deeply."""
    call = msgspec.msgpack.encode(m.Call(7, m.LoadAdapterArgs("a", FolderSource("/a"), config={"k": 1})))
    return call.replace(b"\xa1k\x01", b"\xa1k" + b"\x91" * depth + b"\x01")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\x00",
        deep(100_000),
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x81\x90\x01",  # a list as the key of a map
        b"\xd7\xff" + b"\xff" * 8,  # a time outside of the calendar
        b"\x81\xa4type\xa2\xff\xfe",
    ],
)
async def test_bytes_that_are_no_message_do_not_disturb_the_engine(frame):
    with listening() as engine:
        context = zmq.asyncio.Context()
        bad = context.socket(zmq.DEALER)
        guard_client(bad, SECRET)
        bad.connect(engine.fleet)
        await bad.send(frame)
        await bad.send_multipart([b"", frame, frame])
        await bad.send(msgspec.msgpack.encode(m.Hello(5)))
        async with asyncio.timeout(30):
            await bad.recv()  # the Welcome: the engine has read all of them
        assert engine.received[-1] == m.Hello(5)
        async with connected(engine.fleet, SECRET) as gateway:
            assert await gateway.call(m.PauseStatusArgs()) == {}
        context.destroy(linger=0)


async def test_a_message_above_the_limit_of_the_network_ends_its_connection_only(monkeypatch):
    monkeypatch.setattr(zmq_transport, "MAX_NETWORK_BYTES", 4096)
    with listening() as engine:
        async with connected(engine.fleet, SECRET) as gateway, connected(engine.fleet, SECRET) as large:
            with pytest.raises(EngineDead):
                await large.call(m.SetVersionArgs("x" * 8192))
            assert await gateway.call(m.PauseStatusArgs()) == {}
        async with connected(engine.local) as server:
            assert await server.call(m.SetVersionArgs("x" * 8192)) == {}


class Strangers:
    """``num`` connections without the fleet key, which say nothing."""

    def __init__(self, endpoint: str, num: int):
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._sockets = [socket.socket() for _ in range(num)]
        for one in self._sockets:
            one.setblocking(False)
            one.connect_ex((host, int(port)))

    def let_in(self) -> int:
        """Return how many have got ZMQ's greeting, and still have their connection."""
        return sum(map(self._is_greeted, self._sockets))

    def _is_greeted(self, one: socket.socket) -> bool:
        try:
            return len(one.recv(1, socket.MSG_PEEK)) > 0
        except OSError:  # nothing has come, or the connection is lost
            return False

    def close(self) -> None:
        for one in self._sockets:
            one.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_strangers_are_let_in_up_to_a_limit_and_disturb_nobody_who_has_the_key(monkeypatch):
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 8)
    with listening() as engine:
        async with connected(engine.fleet, SECRET) as gateway, connected(engine.local) as server:
            first = Strangers(engine.fleet, 7)  # with the gateway's, as many connections as there may be
            await until(lambda: engine.transport._limit.is_reached)
            others = Strangers(engine.fleet, 100)
            for _ in range(50):  # without the limit, ZMQ lets in all of them in this time
                assert await gateway.call(m.PauseStatusArgs()) == await server.call(m.PauseStatusArgs()) == {}
            assert first.let_in() == 7 and others.let_in() <= connection_limit.BACKLOG
            async with connected(engine.local) as another:
                assert await another.call(m.PauseStatusArgs()) == {}
            first.close()
            others.close()
            async with connected(engine.fleet, SECRET) as next_gateway:
                assert await next_gateway.call(m.PauseStatusArgs()) == {}


async def test_a_gateway_can_connect_though_strangers_stay(monkeypatch):
    """Strangers are cut when the time for the handshake has passed. So their number here ends too."""
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(zmq_transport, "HANDSHAKE_S", 0.2)
    with listening() as engine:
        strangers = Strangers(engine.fleet, 16)
        await until(lambda: strangers.let_in() >= 8)
        async with connected(engine.fleet, SECRET) as gateway:
            assert await gateway.call(m.PauseStatusArgs()) == {}
        strangers.close()


async def test_the_limit_leaves_files_for_the_engine(monkeypatch):
    monkeypatch.setattr(connection_limit.resource, "getrlimit", lambda kind: (256, 4096))
    with listening() as engine:
        assert engine.transport._limit.max_open == 64


async def test_connections_of_api_servers_count_for_no_limit(monkeypatch):
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 2)
    with listening() as engine:
        async with connected(engine.local), connected(engine.local), connected(engine.fleet, SECRET) as gateway:
            assert await gateway.call(m.PauseStatusArgs()) == {} and not engine.transport._limit.is_reached
