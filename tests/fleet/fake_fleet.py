"""A fleet in this process: engines on the fake runner with ZMQ, one thread each, and a gateway with HTTP. An engine can
be killed, stopped for a while, and started again."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import uvloop

from e2e.server import until
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.entrypoints.supervisor import bind
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from rl.real_server import Killed, MortalTransport, PacedRunner


class FakeEngine:
    """One engine of the fleet, which runs in a thread. settings: of EngineConfig. runner: arguments of PacedRunner."""

    def __init__(self, name: str, settings: dict[str, Any], runner: dict[str, Any]):
        self.name = name
        self._folder = ipc_dir.create()
        self.endpoint = ipc_dir.endpoint(self._folder)
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "model_roots": ("/",)}
        self._config = EngineConfig(**{"model": "fake", **defaults, **settings})
        self._runner_options = runner
        self.start()

    def start(self) -> None:
        self.runner = PacedRunner(**self._runner_options)
        self._transport = MortalTransport(self.endpoint)
        self.engine = CommonEngine(self._config, self.runner, self._transport, uuid.uuid4().hex)
        self._loop = threading.Thread(target=self._run, args=(self.engine,), daemon=True)
        self._loop.start()

    def _run(self, engine: CommonEngine) -> None:
        with contextlib.suppress(Killed):
            engine.run()

    def kill(self) -> None:
        """End the engine without an answer to any client."""
        self._transport.killed = True
        self._transport.wake()
        self._loop.join(20)
        assert not self._loop.is_alive()
        self._transport.close()

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.endpoint, f"http://{self.name}", "here")

    def close(self) -> None:
        if not self._transport.killed:
            self.kill()
        ipc_dir.remove(self._folder)


class FakeFleet:
    """``num`` engines and a gateway at ``url``. runner: arguments of PacedRunner. config: of the gateway. engine:
    settings of EngineConfig."""

    def __init__(
        self, num: int, runner: dict[str, Any] | None = None, config: FleetConfig | None = None, **engine: Any
    ):
        self.config = config or FleetConfig(fleet_id="fleet-1")
        self.engines = [FakeEngine(f"replica-{i}", engine, runner or {}) for i in range(num)]
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self._made = threading.Event()
        self._gateway = threading.Thread(target=self._serve, daemon=True)
        self._gateway.start()
        self._made.wait()
        self.wait_members(num)

    def _serve(self) -> None:
        async def serve() -> None:
            launcher = StaticLauncher([engine.placement for engine in self.engines])
            self.client = FleetClient(self.config, launcher, lambda placement: ZmqConnector(placement.endpoint))
            config = ServeConfig(model="fake", served_model_name="tiny", keepalive_s=0.2, model_roots=("/",))
            self._uvicorn = make_server(self.client, None, config)
            self._made.set()
            await self._uvicorn.serve(sockets=[self._listener])

        uvloop.run(serve())

    def wait_members(self, num: int) -> None:
        until(lambda: sum(r.in_quorum for r in self.client.membership.replicas.values()) == num, 20, f"{num} members")
        until(lambda: self.http.get("/health").status_code == 200, 20, "healthy")

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._gateway.join(20)
        self.http.close()
        for engine in self.engines:
            engine.close()


@contextlib.contextmanager
def fake_fleet(num: int, **options: Any) -> Iterator[FakeFleet]:
    fleet = FakeFleet(num, **options)
    try:
        yield fleet
    finally:
        fleet.close()
