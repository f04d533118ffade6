"""The gateway of a fleet: ``python -m fastdeploy.entrypoints.gateway`` (started by entrypoints/fleet.py).

An API server whose client speaks to the engines of all replicas. The gateway has no state that its replicas do not
have, so another one can take its place at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from fastdeploy.client.tokenizer import Tokenizer, load_tokenizer
from fastdeploy.core.config import from_json
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import collect_rarely, setup_logging
from fastdeploy.entrypoints.api_server import announce, keep_freed_memory, make_server
from fastdeploy.entrypoints.gateway_config import GatewayConfig, LauncherSpec, LocalSpec, RaySpec, StaticSpec
from fastdeploy.entrypoints.ray_launcher import RayLauncher
from fastdeploy.entrypoints.supervisor import BEAT_S, BEATS_PER_STALL
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.launcher import Launcher, LocalLauncher, StaticLauncher
from fastdeploy.http.guards.keys import Keys, take_keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.event_pipe import EventPipe
from fastdeploy.inter_communicator.fleet_key import take_fleet_key, with_fleet_key
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many


def make_launcher(spec: LauncherSpec, keys: Keys, fleet_key: str | None, events: EventPipe) -> Launcher:
    """Return the launcher that ``spec`` describes. keys: of the replicas' API servers."""
    match spec:
        case LocalSpec():
            return LocalLauncher(socket.socket(fileno=spec.link_fd), lambda: _parent_died(spec.folder))
        case StaticSpec():
            return StaticLauncher(spec.placements)
        case RaySpec():
            secrets = with_fleet_key(keys.environment({}), fleet_key)
            return RayLauncher(spec.ray, spec.replica, secrets, events.refuse)


def replica_keys(spec: LauncherSpec, keys: Keys, fleet_key: str | None) -> Keys:
    """Return the keys of the replicas' own API servers. Those that Ray starts are on the network, where control routes
    need a key; if there is none, it is made from the secret of the fleet, which all gateways have."""
    if keys.control or fleet_key is None or not isinstance(spec, RaySpec):
        return keys
    return Keys(
        keys.data, (hmac.digest(fleet_key.encode(), b"control routes of replicas", hashlib.sha256).hex().encode(),)
    )


def _parent_died(folder: str) -> None:
    """End this process in order. The system has killed the replicas, or their engines end by themselves."""
    ipc_dir.remove(folder)
    os.kill(os.getpid(), signal.SIGTERM)


async def beat(events: EventPipe, stall_s: float) -> None:
    """Tell the parent that the event loop runs, until this is cancelled. stall_s: see Fleet."""
    while True:
        events.beat()
        await asyncio.sleep(min(BEAT_S, stall_s / BEATS_PER_STALL))


async def serve(
    config: GatewayConfig,
    keys: Keys,
    fleet_key: str | None,
    tokenizer: Tokenizer | None,
    listeners: Sequence[socket.socket],
    events: EventPipe,
) -> None:
    """Serve until a stop signal."""
    own_keys = replica_keys(config.launcher, keys, fleet_key)
    key = next(iter(own_keys.control or own_keys.data), b"").decode()  # not in the config, which is on the command line
    fleet = msgspec.structs.replace(config.fleet, replica_key=key)
    launcher = make_launcher(config.launcher, own_keys, fleet_key, events)
    context = context_of_many()
    client = FleetClient(fleet, launcher, lambda place: ZmqConnector(place.endpoint, fleet_key, context))
    server = make_server(client, tokenizer, config.serve, keys)
    telling = [asyncio.create_task(announce(client, events)), asyncio.create_task(beat(events, config.serve.stall_s))]
    collect_rarely()
    await server.serve(sockets=list(listeners))
    for task in telling:
        task.cancel()
    context.destroy(linger=0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="GatewayConfig as JSON")
    parser.add_argument("--http-fds", type=int, nargs="+", required=True, help="inherited listening sockets")
    parser.add_argument("--event-fd", type=int, required=True, help="inherited pipe for events to the parent")
    args = parser.parse_args()
    setup_logging("gateway")
    keep_freed_memory()
    listeners = [socket.socket(fileno=fd) for fd in args.http_fds]
    config, keys, events = from_json(args.config, GatewayConfig), take_keys(os.environ), EventPipe(args.event_fd)
    try:
        fleet_key = take_fleet_key(os.environ)
        tokenizer = load_tokenizer(config.serve.model)
    except InvalidField as error:
        return events.refuse(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, keys, fleet_key, tokenizer, listeners, events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
