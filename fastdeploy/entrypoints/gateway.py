"""The gateway of a fleet: ``python -m fastdeploy.entrypoints.gateway`` (started by entrypoints/fleet.py).

An API server whose client speaks to the engines of all replicas, and to the other gateways. The gateway has no state
that its replicas do not have, so another one can take its place at any time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import msgspec

from fastdeploy.entrypoints.api_server import ServerProcess, run_server
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.gateway_config import (
    GatewayConfig,
    LauncherSpec,
    LocalSpec,
    RaySpec,
    StaticSpec,
    replica_keys,
)
from fastdeploy.entrypoints.ray_launcher import RayLauncher
from fastdeploy.entrypoints.supervisor import BEAT_S, BEATS_PER_STALL
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.launcher import Launcher, LocalLauncher, StaticLauncher
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.http.guards.keys import Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.fleet_key import with_fleet_key
from fastdeploy.inter_communicator.peer_transport import ZmqPeerTransport
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


def _parent_died(folder: str) -> None:
    """End this process in order. The system has killed the replicas, or their engines end by themselves."""
    ipc_dir.remove(folder)
    os.kill(os.getpid(), signal.SIGTERM)


async def beat(events: EventPipe, stall_s: float) -> None:
    """Tell the parent that the event loop runs, until this is cancelled. stall_s: see Fleet."""
    while True:
        events.beat()
        await asyncio.sleep(min(BEAT_S, stall_s / BEATS_PER_STALL))


async def serve(config: GatewayConfig, process: ServerProcess) -> None:
    """Serve until a stop signal."""
    fleet_key, events = process.fleet_key, process.events
    own_keys = replica_keys(config.launcher, process.keys, fleet_key)
    key = next(iter(own_keys.control or own_keys.data), b"").decode()  # not in the config, which is on the command line
    fleet = msgspec.structs.replace(config.fleet, replica_key=key)
    launcher = make_launcher(config.launcher, own_keys, fleet_key, events)
    context = context_of_many()
    link = None
    if config.endpoint:
        transport = ZmqPeerTransport(config.endpoint, fleet_key)
        link = PeerLink(transport, lambda address: ZmqConnector(address, fleet_key, context))
    client = FleetClient(fleet, launcher, lambda place: ZmqConnector(place.endpoint, fleet_key, context), link=link)
    beating = asyncio.create_task(beat(events, config.serve.stall_s))
    await process.serve(client, config.serve)
    beating.cancel()
    context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(run_server(GatewayConfig, serve))
