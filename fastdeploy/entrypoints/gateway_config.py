"""Settings of a gateway's process, which its parent passes as JSON."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from fastdeploy.entrypoints.ray_actors import RayConfig
from fastdeploy.entrypoints.ray_replica import ReplicaSpec
from fastdeploy.entrypoints.supervisor import ServerConfig
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.http.guards.keys import Keys

GATEWAY_MAIN = "fastdeploy.entrypoints.gateway"
GATEWAY_STALLS = 3  # a replica's clients notice nothing if it is killed, but those of a gateway lose their connections


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


def replica_keys(spec: LauncherSpec, keys: Keys, fleet_key: str | None) -> Keys:
    """Return the keys of the replicas' own API servers. Those that Ray starts are on the network, where control routes
    need a key; if there is none, it is made from the secret of the fleet, which all gateways have."""
    if keys.control or fleet_key is None or not isinstance(spec, RaySpec):
        return keys
    return Keys(
        keys.data, (hmac.digest(fleet_key.encode(), b"control routes of replicas", hashlib.sha256).hex().encode(),)
    )
