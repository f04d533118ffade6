"""The way in which a gateway that was replaced ends: no client loses a connection with which it has something to do.

Its successor listens at the same sockets. So this process closes its own at once, and a connection that the kernel has
queued goes to the successor. Each answer that begins from then on says "Connection: close", so its client opens the
next connection, which the successor gets. Streams run to their end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import uvicorn

from fastdeploy.fleet.client import FleetClient

logger = logging.getLogger(__name__)
LEAVE = signal.SIGUSR1
LOOK_S = 0.1
IDLE_S = 3.0  # a connection without a request for so long is closed, as one that is kept alive is after its time
# After so long without a request to an engine and without a call, what is still being answered is ended: a feed of /ui,
# which begins again by itself.
FEED_S = 60.0
LEAVE_S = 3600.0  # after which everything is ended
CLOSE = (b"connection", b"close")


def leave_on_signal(server: uvicorn.Server, client: FleetClient) -> None:
    """Begin to leave when LEAVE comes. Call this in the event loop of the server."""
    leaving: list[asyncio.Task[None]] = []

    def begin() -> None:
        if not leaving:
            leaving.append(asyncio.get_running_loop().create_task(leave(server, client), name="leaving"))

    asyncio.get_running_loop().add_signal_handler(LEAVE, begin)


async def leave(server: uvicorn.Server, client: FleetClient) -> None:
    """Take no new connections, serve those that are open to their end, and end the server then. The fleet is left to
    the other gateways once nothing is being changed."""
    logger.info("this gateway is replaced: it serves the connections that it has, and takes no new ones")
    for listener in server.servers:
        listener.close()
    server.config.encoded_headers.append(CLOSE)
    server.server_state.default_headers.append(CLOSE)
    now = asyncio.get_running_loop().time
    end, quiet_since = now() + LEAVE_S, now()
    idle_since = dict[Any, tuple[Any, float]]()
    while not server.should_exit and now() < end:
        for connection in list(server.server_state.connections):
            _close_if_idle(connection, idle_since, now())
        if not client.quiet:
            quiet_since = now()
        elif not server.server_state.connections or now() - quiet_since >= FEED_S:
            break
        await asyncio.sleep(LOOK_S)
    client.sign_off()
    server.should_exit = True


def _close_if_idle(connection: Any, idle_since: dict[Any, tuple[Any, float]], now: float) -> None:
    """Close a connection that has had no request for IDLE_S. idle_since: of each one that is idle, the last request
    that it had, and the time."""
    last = connection.cycle
    if not connection.is_idle:
        idle_since.pop(connection, None)
        return
    request, since = idle_since.setdefault(connection, (last, now))
    if request is not last:
        idle_since[connection] = (last, now)
    elif now - since >= IDLE_S:
        connection.transport.close()
