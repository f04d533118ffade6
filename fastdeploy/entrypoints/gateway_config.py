"""Settings of a gateway's process, which its parent passes as JSON."""

from __future__ import annotations

import msgspec

from fastdeploy.entrypoints.ray_launcher import RayConfig
from fastdeploy.entrypoints.ray_replica import ReplicaSpec
from fastdeploy.entrypoints.supervisor import ServerConfig
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement


class LocalSpec(msgspec.Struct, frozen=True, tag="local"):
    """Replicas that the parent starts. link_fd: inherited end of a socket pair. folder: of the replicas' sockets, which
    the gateway removes if the parent dies."""

    link_fd: int
    folder: str


class StaticSpec(msgspec.Struct, frozen=True, tag="static"):
    """Replicas that somebody else runs."""

    placements: list[Placement]


class RaySpec(msgspec.Struct, frozen=True, tag="ray"):
    """Replicas that Ray starts."""

    ray: RayConfig
    replica: ReplicaSpec


LauncherSpec = LocalSpec | StaticSpec | RaySpec


class GatewayConfig(ServerConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of a gateway. launcher: who starts the replicas. endpoint: ZMQ address at which it listens for the other
    gateways of the fleet; a port 0 becomes a free one; "" = there are no others."""

    fleet: FleetConfig
    launcher: LauncherSpec
    endpoint: str = ""
