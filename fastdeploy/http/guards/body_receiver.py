"""Receives the body of an upload straight into the memory of its route. The parser would copy each byte four times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from fastdeploy.http.guards.connection_limits import HttpProtocol

EXTENSION = "fastdeploy.body_receiver"  # of the ASGI scope


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of the protocol ``http`` while the body of its request, of ``nbytes`` bytes, is received. The
    route must not read the body in another way. received: called with each number of bytes. complete: called once the
    parser would have seen the end of the body. linger_s: seconds in which the rest of a refused body is dropped."""

    def __init__(
        self,
        http: HttpProtocol,
        nbytes: int,
        received: Callable[[int], None],
        complete: Callable[[], None],
        linger_s: float,
    ) -> None:
        self._http, self._cycle, self._left = http, http.cycle, nbytes
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
        self._http.transport.linger_for(self._left, self._linger_s)
        if cycle.waiting_for_100_continue:
            self._http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
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
        http.transport.set_protocol(self)
        http.flow.resume_reading()
        try:
            await self._filled
        finally:
            http.flow.pause_reading()
            http.transport.set_protocol(http)
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
        return self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.give_up()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
