"""ZMQ over a unix socket: ROUTER at the engine, one asyncio DEALER per API server.

Every connection has a new random identity, so no message of an old connection reaches a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator.encoding import encode
from fastdeploy.inter_communicator.messages import Call, Malformed, ToClient, ToEngine

logger = logging.getLogger(__name__)
LINGER_MS = 200
MAX_BATCH = 4096


class ZmqRouterTransport:
    """The engine's end (see transport.Transport). Bytes that are no message are logged. See Malformed."""

    def __init__(self, endpoint: str):
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        messages = self._drain()
        if messages or timeout_s == 0:
            return messages
        # Rounded up, since a timeout of 0 ms would not wait at all.
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000) + 1
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
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
        self._socket.close()
        self._context.term()

    def __del__(self) -> None:
        # Not in close(): a signal handler or a staging thread may call wake() later.
        os.close(self._wake_fd)


def _malformed(frame: bytes, why: str) -> Malformed | None:
    """Return the report of a message that does not fit its type. None if its sender waits for no answer."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    kind, fields = (fields.get("type"), fields) if isinstance(fields, dict) else (None, {})
    call_id, request_id = fields.get("call_id"), fields.get("request_id")
    if kind == Call.__name__ and isinstance(call_id, int):
        return Malformed(why, call_id=call_id)
    if kind == AddRequest.__name__ and isinstance(request_id, str):
        return Malformed(why, request_id=request_id)
    return None


class ZmqConnector:
    """Makes the connections of one API server to ``endpoint`` (see client.connection.Connector)."""

    def __init__(self, endpoint: str):
        self._context = zmq.asyncio.Context()
        self._endpoint = endpoint

    def connect(self) -> ZmqConnection:
        try:
            return ZmqConnection(self._context, self._endpoint)
        except zmq.ZMQError as error:  # such as too many open files
            raise OSError(error.errno, str(error)) from error

    def close(self) -> None:
        self._context.destroy(linger=0)


class ZmqConnection:
    """One connection of a client (see client.connection.Connection). Messages that are sent before the engine's socket
    is there wait for it."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str):
        self.identity = uuid.uuid4().hex
        self._socket = new_socket(context, zmq.DEALER, LINGER_MS)
        self._socket.setsockopt(zmq.IDENTITY, self.identity.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._socket.connect(endpoint)

    def send(self, message: ToEngine) -> None:
        """Queue ``message``. Without a high-water mark the future of ZMQ is done at once."""
        self._socket.send(self._encoder.encode(message))

    async def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages of the engine. End when the engine has closed its socket and all messages are yielded.
        Messages that have arrived are yielded without a return to the event loop. So no message waits for the tasks
        that an earlier message woke."""
        lost = asyncio.ensure_future(self._lost())
        try:
            while True:
                while _can_receive(self._socket):
                    yield self._decoder.decode(await self._socket.recv(zmq.NOBLOCK))
                if lost.done():
                    return
                frame = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((frame, lost), return_when=asyncio.FIRST_COMPLETED)
                if frame.done():
                    yield self._decoder.decode(frame.result())
                else:
                    frame.cancel()
        finally:
            lost.cancel()

    async def _lost(self) -> None:
        """Return when the engine's process has died or closed its socket."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return

    def close(self) -> None:
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


def _can_receive(socket: zmq.Socket[Any] | zmq.asyncio.Socket) -> bool:
    events = socket.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)
