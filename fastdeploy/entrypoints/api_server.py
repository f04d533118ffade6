"""The process of one API server: ``python -m fastdeploy.entrypoints.api_server``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, cast

import uvicorn
import uvloop

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer, load_tokenizer
from fastdeploy.core.config import ServeConfig, from_json
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import collect_rarely, setup_logging
from fastdeploy.http.app import create_app
from fastdeploy.http.guards.connection_limits import HttpProtocol
from fastdeploy.http.guards.keys import NO_KEYS, Keys, take_keys
from fastdeploy.inter_communicator.event_pipe import EventPipe
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

BACKLOG = 4096
# Options of mallopt (malloc.h), and their values in bytes.
KEEP_FREED_MEMORY = {-3: 4 << 20, -1: 64 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


class ApiServer(uvicorn.Server):
    """A uvicorn server. At shutdown it ends its open requests first, then waits for their connections to close."""

    def __init__(self, config: uvicorn.Config, client: ServingClient, bound_s: float):
        super().__init__(config)
        self._client = client
        self._bound_s = bound_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        aborting = asyncio.create_task(self._client.abort_open(self._bound_s))
        await super().shutdown(sockets)
        await aborting


def make_server(
    client: ServingClient, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys = NO_KEYS
) -> ApiServer:
    """Return a server of :func:`create_app`. Connections get half of shutdown_s to close, and the engine a quarter to
    end open requests."""
    uvicorn_config = uvicorn.Config(
        create_app(client, tokenizer, config, keys),
        loop="uvloop",
        http=cast(Any, functools.partial(HttpProtocol, config)),  # uvicorn declares a class, but only calls it
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=config.http_keepalive_s,
        timeout_graceful_shutdown=max(1, round(config.shutdown_s / 2)),
        log_config=None,
        access_log=False,
        server_header=False,
    )
    return ApiServer(uvicorn_config, client, bound_s=config.shutdown_s / 4)


async def serve(
    config: ServeConfig,
    keys: Keys,
    tokenizer: Tokenizer | None,
    endpoint: str,
    listeners: Sequence[socket.socket],
    events: EventPipe,
) -> None:
    client = EngineClient(ZmqConnector(endpoint), config.stall_s)
    server = make_server(client, tokenizer, config, keys)
    announcing = asyncio.create_task(announce(client, events))
    collect_rarely()
    await server.serve(sockets=list(listeners))
    announcing.cancel()


async def announce(client: ServingClient, events: EventPipe) -> None:
    """Send "up" now, and "ready" when an engine is connected."""
    events.send("up")
    await client.connected.wait()
    events.send("ready", boot_id=(await client.require_engine()).boot_id)


def keep_freed_memory() -> None:
    """Let malloc use freed memory again, in place of fresh pages of the system for each piece of an upload that the
    event loop reads. Larger blocks, and more than 64 MiB of freed memory, are given back as before. Needs glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, nbytes in KEEP_FREED_MEMORY.items():
            mallopt(option, nbytes)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="ServeConfig as JSON")
    parser.add_argument("--endpoint", required=True, help="ZMQ address of the engine")
    parser.add_argument("--http-fds", type=int, nargs="+", required=True, help="inherited listening sockets")
    parser.add_argument("--event-fd", type=int, required=True, help="inherited pipe for events to the supervisor")
    args = parser.parse_args()
    setup_logging("api")
    keep_freed_memory()
    listeners = [socket.socket(fileno=fd) for fd in args.http_fds]
    config, keys, events = from_json(args.config, ServeConfig), take_keys(os.environ), EventPipe(args.event_fd)
    try:
        tokenizer = load_tokenizer(config.model)
    except InvalidField as error:
        return events.refuse(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, keys, tokenizer, args.endpoint, listeners, events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
