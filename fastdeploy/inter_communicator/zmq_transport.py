"""ZMQ: ROUTER at the engine, one DEALER per API server over a unix socket, and one per gateway, also over TCP.

Every connection has a new random identity, so no message of an old connection reaches a new one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from fastdeploy.core.errors import EngineDead, FastDeployError
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator.connection_limit import ConnectionLimit
from fastdeploy.inter_communicator.fleet_key import guard_client, guard_engine, require_fleet_key
from fastdeploy.inter_communicator.messages import Call, Failure, Malformed, Rejected, Reply, ToClient, ToEngine

logger = logging.getLogger(__name__)
LINGER_MS = 200
MAX_BATCH = 4096
MAX_NETWORK_BYTES = 256 << 20  # of one message over TCP; the connection of a longer one is closed
RECONNECT_MS = 50  # over a unix socket
# Over TCP each connection tries once. Without any reconnecting (-1) a send would block after a failure.
NEVER_MS = 24 * 3600 * 1000
CONNECT_S = 5.0  # for a TCP connection and its handshake
HANDSHAKE_S = 5.0  # at the engine: a connection without the fleet key is closed after this time at the latest
RETRY_S = 1.0  # a TCP connection that cannot be made ends no sooner
# A peer that does not answer a ping for so long is gone, also if its host vanished without a word.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 8000
# Events of a TCP connection. The engine closes the connection of a client that does not know its key.
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
ENDED = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED  # before the handshake: nobody listens there
OVER_TCP = zmq.EVENT_HANDSHAKE_SUCCEEDED | ENDED | sum(HANDSHAKE_FAILED)
POLLIN = int(zmq.POLLIN)  # the operators of an enum are slow
REFUSED = "refused the fleet key, or is no engine of this fleet: FASTDEPLOY_FLEET_KEY must be the same on both sides"


_encoder = msgspec.msgpack.Encoder()


class ZmqRouterTransport:
    """The engine's end (see transport.Transport). Bytes that are no message are logged. See Malformed.

    endpoint: a unix socket, or "" = none. fleet_endpoint: a second address, for gateways: "" = none, "ipc://..." or
    "tcp://host:port"; port 0 = any free one. secret: the fleet key, which TCP needs (see fleet_key.py); raises
    InvalidField without it, and ZMQError if an address cannot be used."""

    def __init__(self, endpoint: str, fleet_endpoint: str = "", secret: str | None = None):
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        require_fleet_key(fleet_endpoint, secret)
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._limit: ConnectionLimit | None = None
        try:
            if endpoint:
                self._socket.bind(endpoint)
            self.fleet_endpoint = self._listen_for_gateways(fleet_endpoint, secret)
        except zmq.ZMQError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def _listen_for_gateways(self, endpoint: str, secret: str | None) -> str:
        """Listen on ``endpoint`` too, and return the real address. The options that are set here hold for later binds
        only, so not for the unix socket of the API servers."""
        if not endpoint:
            return ""
        if endpoint.startswith("tcp://"):
            assert secret is not None
            guard_engine(self._socket, secret)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_NETWORK_BYTES)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
            _set_tcp_options(self._socket, endpoint)
            self._limit = ConnectionLimit(self._context, self._socket)
        self._socket.bind(endpoint)
        real: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return real.rstrip(b"\0").decode()

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        messages = self._drain()
        if messages or timeout_s == 0:
            return messages
        # Rounded up, since a timeout of 0 ms would not wait at all.
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        for source, _ in self._poller.poll(timeout_ms):
            if source == self._wake_fd:
                os.eventfd_read(self._wake_fd)
        return self._drain()

    def _drain(self) -> list[tuple[str, ToEngine | Malformed]]:
        messages: list[tuple[str, ToEngine | Malformed]] = []
        while len(messages) < MAX_BATCH and _can_receive(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            client = frames[0].decode("latin-1")
            try:
                messages.append((client, self._decoder.decode(frames[-1])))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
                logger.error("a malformed message of client %r: %s", client, error)
                if (malformed := _malformed(frames[-1], str(error))) is not None:
                    messages.append((client, malformed))
        return messages

    def send(self, client: str, message: ToClient) -> bool:
        data = encode(message)
        try:
            self._socket.send_multipart((client.encode("latin-1"), data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
            self._limit = None
        self._socket.close()
        self._context.term()

    def __del__(self) -> None:
        # Not in close(): a signal handler or a staging thread may call wake() later.
        os.close(self._wake_fd)


def _malformed(frame: bytes, why: str) -> Malformed | None:
    """Return the report of a message that does not fit its type. None if its sender waits for no answer."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError):
        return None
    kind, fields = (fields.get("type"), fields) if isinstance(fields, dict) else (None, {})
    call_id, request_id = fields.get("call_id"), fields.get("request_id")
    if kind == Call.__name__ and isinstance(call_id, int):
        return Malformed(why, call_id=call_id)
    if kind == AddRequest.__name__ and isinstance(request_id, str):
        return Malformed(why, request_id=request_id)
    return None


def encode(message: ToClient) -> bytes:
    """Encode ``message`` with msgpack. Lone surrogates are replaced by "?". A Reply or Rejected that still cannot be
    encoded, such as one with an integer of more than 64 bits, becomes an internal error to the same caller. For any
    other message the error of msgspec is raised, since the engine itself made the mistake."""
    try:
        try:
            return _encoder.encode(message)
        except UnicodeEncodeError:
            logger.warning("a %s has text that UTF-8 cannot hold: replaced", type(message).__name__)
            return _encoder.encode(_without_surrogates(msgspec.to_builtins(message, builtin_types=(bytes,))))
    except Exception as error:
        return _encoder.encode(_internal_error(message, error))


def _internal_error(message: ToClient, error: Exception) -> Reply | Rejected:
    text = f"the engine's answer cannot be sent: {type(error).__name__}: {error}"
    failure = Failure(FastDeployError.code, _without_surrogates(text))
    match message:
        case Reply(call_id=call_id):
            logger.error("the reply to call %d cannot be encoded", call_id, exc_info=error)
            return Reply(call_id, {}, failure)
        case Rejected(request_id=request_id):
            logger.error("the refusal of a request cannot be encoded", exc_info=error)
            return Rejected(request_id, failure)
    raise error


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
    return value


def context_of_many() -> zmq.Context[Any]:
    """Return a context for connectors to hundreds of engines. The caller ends it with ``destroy``."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


class ZmqConnector:
    """The maker of the connections of one client to ``endpoint`` (see transport.Connector). secret: the fleet key,
    which a TCP endpoint needs. Raises InvalidField without it. context: shared with other connectors, so that two
    threads of ZMQ serve them all; the caller ends it. None = one of its own."""

    def __init__(self, endpoint: str, secret: str | None = None, context: zmq.Context[Any] | None = None):
        require_fleet_key(endpoint, secret)
        self._owns_context = context is None
        self._context = zmq.Context() if context is None else context
        self._endpoint = endpoint
        self._secret = secret

    def connect(self) -> ZmqConnection:
        try:
            return ZmqConnection(self._context, self._endpoint, self._secret)
        except zmq.ZMQError as error:  # such as too many open files
            raise OSError(error.errno, f"{self._endpoint}: {error}") from error

    def close(self) -> None:
        if self._owns_context:
            self._context.destroy(linger=0)


class ZmqConnection:
    """One connection of a client (see transport.Connection). Over a unix socket, messages that are sent before
    the engine's socket is there wait for it. Over TCP the connection tries once, and its ``messages`` raise EngineDead,
    which names the address, if the engine cannot be reached, refuses the fleet key, or is lost. Make it in the event
    loop."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, secret: str | None = None):
        self.identity = uuid.uuid4().hex
        self._endpoint = endpoint
        self._over_tcp = endpoint.startswith("tcp://")
        self._socket = new_socket(context, zmq.DEALER, LINGER_MS)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        try:
            self._socket.setsockopt(zmq.IDENTITY, self.identity.encode())
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS if self._over_tcp else RECONNECT_MS)
            if self._over_tcp:
                assert secret is not None
                guard_client(self._socket, secret)
                self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
                self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(CONNECT_S * 1000))
                _set_tcp_options(self._socket, endpoint)
            events = OVER_TCP if self._over_tcp else zmq.EVENT_DISCONNECTED
            self._monitor = self._socket.get_monitor_socket(events)
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._readable, self._has_event = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def send(self, message: ToEngine) -> None:
        """Queue ``message``. Without a high-water mark this never blocks."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        self._readable.set()  # ZMQ may have taken in new messages meanwhile, for which it gives no signal then

    async def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine. End when the engine has closed its socket and all messages are yielded.
        Messages that have arrived are yielded without a return to the event loop. So no message waits for the tasks
        that an earlier message woke."""
        lost = asyncio.ensure_future(self._lost_over_tcp() if self._over_tcp else self._lost())
        lost.add_done_callback(lambda _: self._readable.set())
        self._loop.add_reader(self._socket.get(zmq.FD), self._readable.set)
        self._loop.add_reader(self._monitor.get(zmq.FD), self._has_event.set)
        try:
            while True:
                self._readable.clear()
                while _can_receive(self._socket):
                    yield self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
                if lost.done():
                    lost.result()
                    return
                await self._readable.wait()
        finally:
            lost.cancel()

    async def _next_event(self) -> int:
        while not _can_receive(self._monitor):
            self._has_event.clear()
            await self._has_event.wait()
        event: int = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
        return event

    async def _lost(self) -> None:
        """Return when the engine's process has died or closed its socket."""
        while await self._next_event() != zmq.EVENT_DISCONNECTED:
            pass

    async def _lost_over_tcp(self) -> None:
        """Raise EngineDead when the engine cannot be reached, refuses this client, or is lost."""
        now = asyncio.get_running_loop().time
        begin = now()
        try:
            async with asyncio.timeout(CONNECT_S):
                event = await self._next_event()
        except TimeoutError:
            event = zmq.EVENT_CLOSED
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            await self._next_event()
            raise EngineDead(f"the connection to the engine at {self._endpoint} was lost")
        why = REFUSED if event in HANDSHAKE_FAILED else "cannot be reached"
        await asyncio.sleep(begin + RETRY_S - now())
        raise EngineDead(f"the engine at {self._endpoint} {why}")

    def close(self) -> None:
        if self._socket.closed:
            return
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.get(zmq.FD))
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()


def new_socket(context: zmq.Context[Any], kind: int, linger_ms: int) -> Any:
    """Make a socket without a high-water mark: a send never blocks and drops nothing. linger_ms: time for unsent
    messages after a close."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    return socket


def _set_tcp_options(socket: Any, endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def _can_receive(socket: zmq.Socket[Any]) -> bool:
    events = socket.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & POLLIN)
