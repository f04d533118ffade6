"""The way in which a gateway that was replaced ends: no client loses a connection with which it has something to do.

Its successor listens at the same sockets. So this process closes its own at once, and a connection that the kernel has
queued goes to the successor. Each answer that begins from then on says "Connection: close", so its client opens the
next connection, which the successor gets. Streams run to their end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastdeploy.entrypoints.api_server import ApiServer

logger = logging.getLogger(__name__)
LOOK_S = 0.1
IDLE_S = 3.0  # a connection without a request for so long is closed, as one that is kept alive is after its time
LEAVE_S = 3600.0  # after which what still runs is ended
CLOSE = (b"connection", b"close")


async def leave(server: ApiServer, is_quiet: Callable[[], bool], sign_off: Callable[[], object]) -> None:
    """Take no new connections, serve those that are open to their end, and end the server then. is_quiet: whether
    nothing else runs that must be finished here. sign_off: called before the end."""
    logger.info("this gateway is replaced: it serves the connections that are open, and takes no new ones")
    for listener in server.servers:
        listener.close()
    server.config.encoded_headers.append(CLOSE)
    server.server_state.default_headers.append(CLOSE)
    loop = asyncio.get_running_loop()
    end, idle_since = loop.time() + LEAVE_S, dict[Any, tuple[Any, float]]()
    while (server.server_state.connections or not is_quiet()) and loop.time() < end and not server.should_exit:
        for connection in list(server.server_state.connections):
            _close_if_idle(connection, idle_since, loop.time())
        await asyncio.sleep(LOOK_S)
    sign_off()
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
