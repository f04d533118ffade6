"""The process of one API server: ``python -m fastdeploy.entrypoints.api_server``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import uvicorn
import uvloop

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer, load_tokenizer
from fastdeploy.core.config import ServeConfig, from_json
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.listener import BACKLOG
from fastdeploy.core.loading import read_loading
from fastdeploy.core.process import collect_rarely, setup_logging
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.leaving import leave_on_signal
from fastdeploy.entrypoints.supervisor import ApiServerConfig, ServerConfig
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.app import Extension, create_app
from fastdeploy.http.guards.connection_limits import HttpProtocol
from fastdeploy.http.guards.keys import NO_KEYS, Keys, pop_keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.fleet_key import pop_fleet_key
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector

Config = TypeVar("Config", bound=ServerConfig)
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
    client: ServingClient,
    tokenizer: Tokenizer | None,
    config: ServeConfig,
    keys: Keys = NO_KEYS,
    faults: Extension | None = None,
) -> ApiServer:
    """Return a server of :func:`create_app`. Connections get half of shutdown_s to close, and the engine a quarter to
    end open requests."""
    uvicorn_config = uvicorn.Config(
        create_app(client, tokenizer, config, keys, faults),
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


async def serve(config: ApiServerConfig, process: ServerProcess) -> None:
    """Serve until a stop signal."""
    loading_file = ipc_dir.loading_file(os.path.dirname(config.endpoint.removeprefix("ipc://")))
    client = EngineClient(
        ZmqConnector(config.endpoint), config.serve.stall_s, read_loading=lambda: read_loading(loading_file)
    )
    await process.serve(client, config.serve)


def faults_of(config: ServeConfig, client: EngineClient | FleetClient) -> Extension | None:
    """Give ``client`` and this process the faults of a server with --faults, and return them. Without, nothing of them
    is imported."""
    if not config.faults:
        return None
    from fastdeploy.faults.server import ServerFaults

    faults = ServerFaults(config, client)
    faults.take_clock()
    return faults


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


class ServerProcess(NamedTuple):
    """What a process that serves HTTP gets from its parent, beside its settings. fleet_key: None = of no fleet."""

    keys: Keys
    fleet_key: str | None
    tokenizer: Tokenizer | None
    listeners: Sequence[socket.socket]
    events: EventPipe

    async def serve(self, client: EngineClient | FleetClient, config: ServeConfig) -> None:
        """Serve ``client`` until a stop signal. A gateway also ends some time after LEAVE, see leaving.py. The parent
        gets the events "up" and "ready"."""
        server = make_server(client, self.tokenizer, config, self.keys, faults_of(config, client))
        if isinstance(client, FleetClient):
            leave_on_signal(server, client)
        announcing = asyncio.create_task(announce(client, self.events))
        collect_rarely()
        await server.serve(sockets=list(self.listeners))
        announcing.cancel()


def run_server(kind: type[Config], serve: Callable[[Config, ServerProcess], Coroutine[Any, Any, None]]) -> int:
    """Run the main of a process that serves HTTP, and return the exit status. kind: of its settings, which are on the
    command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help=f"{kind.__name__} as JSON")
    parser.add_argument("--http-fds", type=int, nargs="+", required=True, help="inherited listening sockets")
    parser.add_argument("--event-fd", type=int, required=True, help="inherited pipe for events to the parent")
    args = parser.parse_args()
    config, keys, events = from_json(args.config, kind), pop_keys(os.environ), EventPipe(args.event_fd)
    setup_logging(config.name)
    keep_freed_memory()
    listeners = [socket.socket(fileno=fd) for fd in args.http_fds]
    try:
        tokenizer = load_tokenizer(config.serve.model, config.serve.chat_template)
        process = ServerProcess(keys, pop_fleet_key(os.environ), tokenizer, listeners, events)
    except InvalidField as error:
        return events.refuse(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, process))
    return 0


if __name__ == "__main__":
    sys.exit(run_server(ApiServerConfig, serve))
