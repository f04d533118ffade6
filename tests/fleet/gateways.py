"""Several gateways on the same engines: in threads of this process, or each in a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from e2e.server import until
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.listener import bind
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Launcher, Placement, StaticLauncher
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.peer_transport import ZmqPeerTransport
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fleet.fake_fleet import FakeEngine, FakeGateway, ThreadLauncher
from support.uvicorn_ticks import shorten_ticks

TESTS = Path(__file__).resolve().parents[1]
QUICK = FleetConfig(fleet_id="fleet-1", fence_after_s=1.0, lease_s=1.0, stall_s=2.0, rebuild_s=5.0)


def link_at(address: str) -> PeerLink:
    return PeerLink(ZmqPeerTransport(address), ZmqConnector)


class Gateways:
    """``num`` engines and ``num_gateways`` gateways in threads, of which the first one leads at first."""

    def __init__(
        self,
        num: int,
        num_gateways: int = 2,
        config: FleetConfig = QUICK,
        runner: dict[str, Any] | None = None,
        restarts: bool = False,
        **engine: Any,
    ):
        self._folder = ipc_dir.create()
        self.config = config
        self.engines = [FakeEngine(f"replica-{i}", engine, runner or {}) for i in range(num)]
        self.launcher = ThreadLauncher(self.engines, engine, runner or {})
        self._restarts = restarts
        self.doors: list[FakeGateway] = []
        for _ in range(num_gateways):
            self.add()

    def add(self) -> FakeGateway:
        """Start one more gateway, and wait until it has all members."""
        address = f"ipc://{self._folder}/gateway-{len(self.doors)}.sock"
        door = FakeGateway(self.config, self._make_launcher, lambda: link_at(address))
        self.doors.append(door)
        door.wait_members(len(self.engines))
        return door

    def _make_launcher(self) -> Launcher:
        return self.launcher if self._restarts else StaticLauncher([engine.placement for engine in self.engines])

    def __getitem__(self, i: int) -> FakeGateway:
        return self.doors[i]

    @property
    def leader(self) -> FakeGateway:
        return next(door for door in self.doors if door.client.membership.leadership.leads)

    @property
    def follower(self) -> FakeGateway:
        return next(door for door in self.doors if not door.client.membership.leadership.leads)

    def holds(self) -> list[list[str]]:
        return [sorted(engine.engine.pause.holds) for engine in self.engines]

    def epochs(self) -> list[int]:
        return [engine.engine.scopes.whole.weights_label()["weight_epoch"] for engine in self.engines]

    def close(self) -> None:
        for door in reversed(self.doors):  # those that follow first
            door.end_gateway()
        for engine in self.engines:
            engine.close()
        ipc_dir.remove(self._folder)


@contextlib.contextmanager
def gateways(num: int, num_gateways: int = 2, **options: Any) -> Iterator[Gateways]:
    fleet = Gateways(num, num_gateways, **options)
    try:
        yield fleet
    finally:
        fleet.close()


# ---------------------------------------------------------------------- in processes


class Spec(msgspec.Struct):
    """A gateway process. address: for the other gateways."""

    config: FleetConfig
    placements: list[Placement]
    address: str
    listener_fd: int


class GatewayProcess:
    """A gateway in a process of its own, at ``url``."""

    def __init__(self, config: FleetConfig, engines: list[FakeEngine], address: str):
        self.address = address
        self._spec = config, [engine.placement for engine in engines]
        self.start()

    def start(self) -> None:
        with bind("127.0.0.1", 0) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            spec = msgspec.json.encode(Spec(*self._spec, self.address, listener.fileno()))
            command = [sys.executable, "-m", "fleet.gateways", spec.decode()]
            path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
            environment = {**os.environ, "PYTHONPATH": path}
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def members(self) -> int:
        try:
            replicas = self.http.get("/v1/replicas").json()["replicas"]
        except httpx.HTTPError:
            return 0
        return sum(replica["state"] in ("member", "draining") for replica in replicas)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()
        self.http.close()


class GatewayProcesses:
    """``num`` engines in threads, and gateways in processes."""

    def __init__(self, num: int, num_gateways: int, config: FleetConfig = QUICK, runner: dict[str, Any] | None = None):
        self._folder = ipc_dir.create()
        self.engines = [FakeEngine(f"replica-{i}", {}, runner or {}) for i in range(num)]
        self.doors = [
            GatewayProcess(config, self.engines, f"ipc://{self._folder}/gateway-{i}.sock") for i in range(num_gateways)
        ]
        self.wait(lambda: all(door.members() == num for door in self.doors), "all have all members")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, 30, what)

    @property
    def leader(self) -> GatewayProcess:
        (report,) = self.engines[0].call(m.FleetStateArgs())
        return next(door for door in self.doors if door.address == report["leader"])

    @property
    def followers(self) -> list[GatewayProcess]:
        leader = self.leader
        return [door for door in self.doors if door is not leader]

    def holds(self) -> list[list[str]]:
        return [sorted(engine.engine.pause.holds) for engine in self.engines]

    def close(self) -> None:
        for door in self.doors:
            door.close()
        for engine in self.engines:
            engine.close()
        ipc_dir.remove(self._folder)


@contextlib.contextmanager
def gateway_processes(num: int, num_gateways: int, **options: Any) -> Iterator[GatewayProcesses]:
    fleet = GatewayProcesses(num, num_gateways, **options)
    try:
        yield fleet
    finally:
        fleet.close()


async def serve(spec: Spec) -> None:
    connector = lambda placement: ZmqConnector(placement.endpoint)  # noqa: E731
    launcher = StaticLauncher(spec.placements)
    client = FleetClient(spec.config, launcher, connector, link=link_at(spec.address))
    config = ServeConfig(model="fake", served_model_name="tiny", keepalive_s=0.2, model_roots=("/",))
    await make_server(client, None, config).serve(sockets=[socket.socket(fileno=spec.listener_fd)])


if __name__ == "__main__":
    shorten_ticks()
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Spec)))
