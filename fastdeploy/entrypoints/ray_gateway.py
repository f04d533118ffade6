"""The Ray actor that runs one gateway of a fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from fastdeploy.core.config import is_loopback, to_json
from fastdeploy.core.process import host_id
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.gateway_config import GATEWAY_MAIN, GATEWAY_STALLS, GatewayConfig
from fastdeploy.entrypoints.ports import open_ports, with_ports
from fastdeploy.entrypoints.ray_actor import FastDeployActor, bracketed
from fastdeploy.fleet.launcher import Placement


class GatewaySpec(msgspec.Struct, frozen=True):
    """Settings that all gateways of a fleet share. The actor sets the name and the addresses in config. A gateway
    listens at the address of its host, if config.serve.host is a loopback address. module: run as the gateway."""

    config: GatewayConfig
    module: str = GATEWAY_MAIN


class FastDeployGateway(FastDeployActor[GatewaySpec]):
    """One gateway. The port stays the same, so there can be one gateway of a fleet on each host; with port 0 any
    number."""

    @property
    def _model(self) -> str:
        return self._spec.config.serve.model

    @property
    def _stall_s(self) -> float:
        return self._spec.config.serve.stall_s * GATEWAY_STALLS

    def _start_process(self, secrets: Mapping[str, str]) -> Child:
        config = self._spec.config
        host = self._address if is_loopback(config.serve.host) else config.serve.host
        serve = msgspec.structs.replace(config.serve, host=host)
        ports = open_ports(serve)
        serve, port = with_ports(serve, ports), ports[0].number
        endpoint = f"tcp://{bracketed(self._address)}:0"
        config = msgspec.structs.replace(config, name=self._name, serve=serve, endpoint=endpoint)
        self._url = f"http://{bracketed(self._address)}:{port}"
        fds = [port.sockets[0].fileno() for port in ports]
        child = Child(
            self._name,
            self._spec.module,
            ["--config", to_json(config), "--http-fds", *map(str, fds)],
            fds,
            signal.SIGKILL,
            whole_group=True,
            environment={**os.environ, **secrets},
        )
        for opened in ports:
            opened.close()  # the gateway has them
        return child

    def _placement_of(self, event: Mapping[str, Any]) -> Placement | None:
        return Placement(self._name, "", self._url, host_id()) if event["event"] == "ready" else None
