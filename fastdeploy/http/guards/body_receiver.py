"""The transport of a connection, and the receiver of large bodies on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "fastdeploy.body_receiver"  # of the ASGI scope
# After an early answer, the connection is read for this time and this many bytes before it is closed: more than the
# kernels and the client have between them when the client notices the answer.
LINGER_S = 2.0
LINGER_BYTES = 16 << 20


class LingeringTransport(asyncio.Transport):
    """``transport`` with another :meth:`close`. While the client still sends (``unread``), a closed connection stays
    open for LINGER_S seconds or LINGER_BYTES bytes, or as :meth:`linger_for` says, and these bytes are dropped. Without
    that, the kernel would answer the bytes with a reset, and the client might lose our answer."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self._transport = transport
        self._loop = loop
        self.unread = False
        self._closing = False
        self._left, self._linger_s = LINGER_BYTES, LINGER_S

    def linger_for(self, nbytes: int, seconds: float) -> None:
        """Let :meth:`close` wait longer, if ``nbytes`` bytes are more. For an upload that was admitted: many clients
        look for no answer before they have sent the rest of it."""
        self._left, self._linger_s = max(LINGER_BYTES, nbytes), max(LINGER_S, seconds)

    def close(self) -> None:
        if self.is_closing():
            return
        self._closing = True
        if self.unread:
            self._transport.write_eof()
            self._transport.resume_reading()
            self._loop.call_later(self._linger_s, self._transport.close)
        else:
            self._transport.close()

    def discard(self, nbytes: int) -> None:
        """Count bytes that arrived after :meth:`close`."""
        self._left -= nbytes
        if self._left < 0:
            self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Exchange the protocol. Nothing is read meanwhile, since the two may read in different ways."""
        if self._transport.is_closing():
            return
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        if self._closing:
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class BodyReceiver(asyncio.BufferedProtocol):
    """A protocol that receives the body of an upload straight into the memory of its route: the parser would copy each
    byte four times.

    Takes the place of the protocol ``http`` while the body of its request, of ``nbytes`` bytes, is received. The
    route must not read the body in another way. received: called with each number of bytes. complete: called once the
    parser would have seen the end of the body. linger_s: seconds in which the rest of a refused body is dropped."""

    def __init__(
        self,
        http: HttpToolsProtocol,
        transport: LingeringTransport,
        nbytes: int,
        received: Callable[[int], None],
        complete: Callable[[], None],
        linger_s: float,
    ) -> None:
        self._http, self._transport, self._cycle, self._left = http, transport, http.cycle, nbytes
        self._received, self._complete, self._linger_s = received, complete, linger_s
        self._memory = memoryview(b"")  # to receive into
        self._filled: asyncio.Future[None] | None = None

    @staticmethod
    def of(request: Request) -> BodyReceiver | None:
        """Return the receiver of a request. None: its body is short, or of unknown length."""
        receiver: BodyReceiver | None = request.scope.get("extensions", {}).get(EXTENSION)
        return receiver

    async def into(self, memory: memoryview) -> int:
        """Receive the next bytes of the body, and return their number: that of ``memory``, unless the body ends. Raises
        ClientDisconnect."""
        cycle, room = self._cycle, min(len(memory), self._left)
        self._transport.linger_for(self._left, self._linger_s)
        if cycle.waiting_for_100_continue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        parsed = min(room, len(cycle.body))  # the parser got these bytes together with the headers
        memory[:parsed] = cycle.body[:parsed]
        cycle.body = cycle.body[parsed:]
        self._left -= parsed
        if parsed < room:
            await self._fill(memory[parsed:room])
        if not self._left and cycle.more_body:
            self._complete()
        return room

    async def _fill(self, memory: memoryview) -> None:
        if self._cycle.disconnected:
            raise ClientDisconnect
        http = self._http
        self._memory, self._filled = memory, asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)
        http.flow.resume_reading()
        try:
            await self._filled
        finally:
            http.flow.pause_reading()
            self._transport.set_protocol(http)
            self._memory, self._filled = memoryview(b""), None  # so that nothing here refers to the memory

    def give_up(self) -> None:
        """End a wait of the route, because no further byte will come."""
        if self._filled is not None and not self._filled.done():
            self._filled.set_exception(ClientDisconnect())

    # ------------------------------------------------------------------ calls of the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self._memory = self._memory[nbytes:]
        self._left -= nbytes
        self._received(nbytes)
        if not self._memory:
            self._http.flow.pause_reading()
            if self._filled is not None and not self._filled.done():
                self._filled.set_result(None)

    def eof_received(self) -> bool:
        return bool(self._http.eof_received())  # type: ignore[func-returns-value]  # HttpProtocol returns a bool

    def connection_lost(self, exc: Exception | None) -> None:
        self.give_up()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
