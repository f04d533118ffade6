"""A real fleet on this host, in real processes, which a test may kill."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

import pytest

from e2e.server import Server, until
from fastdeploy.core.process import descendants

KINDS = ("serve", pytest.param("fleet", marks=pytest.mark.slow))


def server_of(kind: str, *flags: str) -> Server:
    """Start ``fastdeploy serve``, or a fleet of two, with the same ``flags``."""
    return Server(*flags) if kind == "serve" else FleetServer(2, *flags)


class FleetServer(Server):
    """``fastdeploy fleet`` with ``num`` replicas."""

    words = ("fastdeploy.entrypoints.cli", "fleet")

    def __init__(self, num: int, *flags: str, **settings: Any):
        super().__init__("--replicas", str(num), *flags, members=num, **settings)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.get("/v1/replicas").ok()["replicas"]}

    def wait_members(self, num: int, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
        """Wait until ``num`` replicas are members, and return the entries of all."""

        def members() -> dict[str, dict[str, Any]] | None:
            replicas = self.replicas()
            return replicas if sum(r["state"] == "member" for r in replicas.values()) == num else None

        return until(members, seconds, f"{num} members")

    @property
    def gateway_pid(self) -> int:
        [pid] = self.gateway_pids
        return pid

    @property
    def gateway_pids(self) -> list[int]:
        return self.pids("fastdeploy.entrypoints.gateway")

    def replica_pid(self, name: str) -> int:
        [pid] = self.pids(f"fastdeploy.entrypoints.replica_main --name {name} ")
        return pid

    def engine_of(self, name: str) -> int | None:
        """Return the engine's process of a replica; None = it has none now."""
        mains = self.pids(f"fastdeploy.entrypoints.replica_main --name {name} ")
        below = {pid for main in mains for pid in descendants(main)}
        return next(iter(below & set(self.pids("fastdeploy.entrypoints.engine_main"))), None)

    def ask(self, name: str, path: str) -> Any:
        """Ask the replica's own API server, and return the result of a native control call."""
        with urlopen(self.replicas()[name]["url"] + path, timeout=30) as reply:
            return json.load(reply)["result"]


class Gateway(FleetServer):
    """``fastdeploy fleet`` that starts no replica. num: of the replicas that ``flags`` name and that join."""

    def __init__(self, num: int, *flags: str):
        Server.__init__(self, *flags, members=num)
