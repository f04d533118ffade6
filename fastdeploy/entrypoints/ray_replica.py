"""The Ray actor that runs one replica of a fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from fastdeploy.core.config import to_json
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.ray_actor import FastDeployActor, bracketed
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.fleet.launcher import Placement

THREADS = "FASTDEPLOY_CPU_THREADS"
REPLICA_MAIN = "fastdeploy.entrypoints.replica_main"


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Settings that all replicas of a fleet share. The actor sets the addresses in config, since only the actor knows
    its host. threads: of each replica, for computing. module: run as the replica."""

    config: ReplicaConfig
    threads: int = 1
    module: str = REPLICA_MAIN


class FastDeployReplica(FastDeployActor[ReplicaSpec]):
    """One replica: a supervisor with its engine and API servers."""

    @property
    def _model(self) -> str:
        return self._spec.config.engine.model

    @property
    def _stall_s(self) -> float:
        return self._spec.config.serve.stall_s

    def _start_process(self, secrets: Mapping[str, str]) -> Child:
        config = self._spec.config
        engine = msgspec.structs.replace(config.engine, fleet_endpoint=f"tcp://{bracketed(self._address)}:0")
        serve = msgspec.structs.replace(config.serve, host=self._address, port=0)
        return Child(
            self._name,
            self._spec.module,
            ["--name", self._name, "--config", to_json(ReplicaConfig(engine, serve))],
            death_signal=signal.SIGKILL,
            whole_group=True,
            environment={**os.environ, THREADS: str(self._spec.threads), **secrets},
        )

    def _placement_of(self, event: Mapping[str, Any]) -> Placement | None:
        if event["event"] != "serving":
            return None
        return Placement(self._name, event["endpoint"], event["url"], event["host"])
