"""A fleet in this process: engines on the fake runner with ZMQ, one thread each, and a gateway with HTTP. An engine can
be killed, stopped for a while, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import httpx
import uvloop

from e2e.server import until
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import EngineError
from fastdeploy.core.listener import bind
from fastdeploy.core.process import host_id
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Launcher, Placement, StaticLauncher, WithoutRoll
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fastdeploy.scheduler.drafts import NoDrafts
from rl.real_server import Killed, MortalTransport, PacedRunner
from support.uvicorn_ticks import shorten_ticks


class StoppableTransport(MortalTransport):
    """While ``running`` is not set, the engine's loop stands still, as in a process that was stopped."""

    def __init__(self, endpoint: str):
        super().__init__(endpoint)
        self.running = threading.Event()
        self.running.set()

    def recv(self, timeout_s: float | None) -> list:
        messages = super().recv(timeout_s)
        self.running.wait()
        if self.killed:
            raise Killed
        return messages


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

    def start(self, prepare: Callable[[CommonEngine], None] = lambda engine: None) -> None:
        """Start the engine. prepare(engine): called before its loop begins."""
        self.runner = PacedRunner(**self._runner_options)
        self._transport = StoppableTransport(self.endpoint)
        self.engine = CommonEngine(self._config, self.runner, self._transport, uuid.uuid4().hex, drafter=NoDrafts())
        prepare(self.engine)
        self._loop = threading.Thread(target=self._run, args=(self.engine,), daemon=True)
        self._loop.start()

    def _run(self, engine: CommonEngine) -> None:
        with contextlib.suppress(Killed, EngineError):  # the second one: a step has failed, and the engine ends
            engine.run()

    def kill(self) -> None:
        """End the engine without an answer to any client."""
        self._transport.killed = True
        self._transport.running.set()
        self._transport.wake()
        self._loop.join(20)
        assert not self._loop.is_alive()
        self._transport.close()

    @property
    def alive(self) -> bool:
        return not self._transport.killed

    def stop(self) -> None:
        """Let the engine stand still, until :meth:`go_on` or :meth:`kill`."""
        self._transport.running.clear()
        self._transport.wake()

    def call(self, *calls: m.Args) -> list[dict[str, Any]]:
        """Make the calls in order, from a connection of its own, and return the results."""

        async def make() -> list[dict[str, Any]]:
            client = EngineClient(ZmqConnector(self.endpoint))
            client.start()
            try:
                return [await client.call(args) for args in calls]
            finally:
                await client.close()

        return asyncio.run(make())

    def go_on(self) -> None:
        self._transport.running.set()

    def restart(self) -> None:
        """End the engine as :meth:`kill` does, if it is there, and start it again."""
        if self.alive:
            self.kill()
        self.start()

    def move(self) -> None:
        """Restart the engine at another endpoint."""
        self.kill()
        ipc_dir.remove(self._folder)
        self._folder = ipc_dir.create()
        self.endpoint = ipc_dir.endpoint(self._folder)
        self.start()

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.endpoint, f"http://{self.name}", host_id())

    def close(self) -> None:
        if not self._transport.killed:
            self.kill()
        ipc_dir.remove(self._folder)


class ThreadLauncher(WithoutRoll):
    """Starts and ends engines in threads of this process, for any number of gateways. A killed engine is started again
    by :meth:`revive` only. restarts: (name, why) of each. engine, runner: as of FakeEngine."""

    def __init__(self, engines: list[FakeEngine], engine: dict[str, Any], runner: dict[str, Any]):
        self.engines = engines
        self._options = (engine, runner)
        self.restarts: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._followers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def find(self, name: str) -> FakeEngine:
        return next(engine for engine in self.engines if engine.name == name)

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        changed = asyncio.Event()
        self._followers.append((asyncio.get_running_loop(), changed))
        while True:
            changed.clear()
            yield [engine.placement for engine in self.engines]
            await changed.wait()

    def tell(self) -> None:
        """Yield the placements to every gateway again."""
        for loop, changed in self._followers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

    def revive(self, name: str) -> None:
        with self._lock:
            self.find(name).restart()

    async def restart(self, name: str, why: str) -> None:
        self.restarts.append((name, why))
        await asyncio.to_thread(self.revive, name)

    async def add(self) -> str:
        name = f"replica-{len(self.engines)}"
        self.engines.append(FakeEngine(name, *self._options))
        self.tell()
        return name

    async def remove(self, name: str) -> None:
        engine = self.find(name)
        self.engines.remove(engine)
        self.tell()
        await asyncio.to_thread(engine.close)

    async def close(self) -> None:
        return


class FakeGateway:
    """A gateway at ``url``. config: of it. make_launcher: makes its launcher. make_link: to the other gateways. serve:
    settings of ServeConfig."""

    def __init__(
        self,
        config: FleetConfig,
        make_launcher: Callable[[], Launcher],
        make_link: Callable[[], PeerLink | None] = lambda: None,
        **serve: Any,
    ):
        self.config = config
        defaults = {"model": "fake", "served_model_name": "tiny", "keepalive_s": 0.2, "model_roots": ("/",)}
        self._serve_config = ServeConfig(**{**defaults, **serve})
        self._make_launcher, self._make_link = make_launcher, make_link
        self.start_gateway()

    def start_gateway(self) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self._made = threading.Event()
        self._gateway = threading.Thread(target=self._serve, daemon=True)
        self._gateway.start()
        self._made.wait()

    def _serve(self) -> None:
        shorten_ticks()

        async def serve() -> None:
            connector = lambda placement: ZmqConnector(placement.endpoint)  # noqa: E731
            self.client = FleetClient(self.config, self._make_launcher(), connector, link=self._make_link())
            self._uvicorn = make_server(self.client, None, self._serve_config)
            self.loop = asyncio.get_running_loop()
            self._made.set()
            await self._uvicorn.serve(sockets=[self._listener])

        uvloop.run(serve())

    def end_gateway(self) -> None:
        self._uvicorn.should_exit = True
        self._gateway.join(20)
        assert not self._gateway.is_alive()
        self.http.close()

    def replace_gateway(self) -> None:
        """End the gateway, and start another one."""
        self.end_gateway()
        self.start_gateway()

    def wait_members(self, num: int) -> None:
        until(lambda: sum(r.in_quorum for r in self.client.membership.replicas.values()) == num, 20, f"{num} members")
        until(lambda: self.http.get("/health").status_code == 200, 20, "healthy")

    def replica(self, name: str) -> Replica:
        return self.client.membership.replicas[name]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run ``work`` in the gateway's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    @contextlib.contextmanager
    def stopped_gateway(self) -> Iterator[None]:
        """Let the gateway stand still meanwhile, as a process that was stopped."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait()

        self.loop.call_soon_threadsafe(stand)
        stands.wait()
        try:
            yield
        finally:
            goes_on.set()


class FakeFleet(FakeGateway):
    """``num`` engines and a gateway at ``url``. runner: arguments of PacedRunner. config: of the gateway. engine:
    settings of EngineConfig. restarts: whether the gateway can restart, add and remove engines, with ``launcher``."""

    def __init__(
        self,
        num: int,
        runner: dict[str, Any] | None = None,
        config: FleetConfig | None = None,
        restarts: bool = False,
        **engine: Any,
    ):
        self.engines = [FakeEngine(f"replica-{i}", engine, runner or {}) for i in range(num)]
        self.launcher = ThreadLauncher(self.engines, engine, runner or {})
        super().__init__(
            config or FleetConfig(fleet_id="fleet-1"),
            lambda: self.launcher if restarts else StaticLauncher([engine.placement for engine in self.engines]),
        )
        self.wait_members(num)

    def close(self) -> None:
        self.end_gateway()
        for engine in self.engines:
            engine.close()


@contextlib.contextmanager
def fake_fleet(num: int, **options: Any) -> Iterator[FakeFleet]:
    fleet = FakeFleet(num, **options)
    try:
        yield fleet
    finally:
        fleet.close()
