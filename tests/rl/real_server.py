"""A real server in this process: HTTP, ZMQ and the engine's loop, on the fake runner. The engine can be restarted, and
a proxy with faults can be put before the server. Clients get the answers of a deployed server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import uvloop

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.listener import bind
from fastdeploy.core.plan import NonFinite, Sampled, ScheduledChunk, StepPlan, StepResult
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, ZmqRouterTransport
from support.fake_runner import FakeRunner, Known
from support.uvicorn_ticks import shorten_ticks


class Killed(BaseException):
    """Ends the engine's loop without an answer to any client."""


class MortalTransport(ZmqRouterTransport):
    killed = False

    def recv(self, timeout_s: float | None) -> list:
        messages = super().recv(timeout_s)
        if self.killed:
            raise Killed
        return messages


class PacedRunner(FakeRunner):
    """A fake runner that yields the CPU in each step, so that events can happen while a request runs. step_s: at first;
    a test may change ``pace_s`` while the engine runs. script: tokens that every choice gets in turn, instead of
    hashes."""

    def __init__(self, step_s: float = 0.0, script: list[int] | None = None, **sizes: int):
        super().__init__(**sizes)
        self.pace_s = step_s
        self._script = script
        self._starts: dict[tuple[str, int], int] = {}

    def execute(self, plan: StepPlan, between_layers: Any = None) -> StepResult | None:
        time.sleep(self.pace_s)
        return super().execute(plan, between_layers)

    def _run(self, chunk: ScheduledChunk, known: Known) -> Sampled | NonFinite | None:
        sampled = super()._run(chunk, known)
        if not isinstance(sampled, Sampled) or self._script is None:
            return sampled
        start = self._starts.setdefault(known.new.key, len(known.tokens))
        return Sampled([self._script[len(known.tokens) - start]], sampled.logprobs)


class RealServer:
    """A real server at ``url``. engine: settings of EngineConfig. runner: arguments of PacedRunner. skew_s: seconds
    that the engine's clock is ahead."""

    def __init__(self, tokenizer: Tokenizer | None = None, runner: dict[str, Any] | None = None, **engine: Any):
        self._folder = ipc_dir.create()
        self._endpoint = ipc_dir.endpoint(self._folder)
        self._runner_options = runner or {}
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "model_roots": ("/",)}
        self._engine_config = EngineConfig(**{"model": "fake", **defaults, **engine})
        self._tokenizer = tokenizer
        self.skew_s = 0.0
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self._start_engine()
        self._made = threading.Event()
        self._api = threading.Thread(target=self._serve, daemon=True)
        self._api.start()
        self._made.wait()
        self.wait_ready()

    def _serve(self) -> None:
        async def serve() -> None:
            self.client = EngineClient(ZmqConnector(self._endpoint))
            config = ServeConfig(model="fake", served_model_name="tiny", keepalive_s=0.2, model_roots=("/",))
            shorten_ticks()
            self._uvicorn = make_server(self.client, self._tokenizer, config)
            self._made.set()
            await self._uvicorn.serve(sockets=[self._listener])

        uvloop.run(serve())

    def _start_engine(self) -> None:
        self.runner = PacedRunner(**self._runner_options)
        self._transport = MortalTransport(self._endpoint)
        self.engine = CommonEngine(
            self._engine_config,
            self.runner,
            self._transport,
            uuid.uuid4().hex,
            clock=lambda: time.monotonic() + self.skew_s,
        )
        self._loop = threading.Thread(target=self._run, args=(self.engine,), daemon=True)
        self._loop.start()

    def _run(self, engine: CommonEngine) -> None:
        with contextlib.suppress(Killed):
            engine.run()

    def restart_engine(self) -> None:
        """Restart the engine as after a crash: no client is answered; the new engine has the start-up weights and no
        hold."""
        self._kill_engine()
        self._start_engine()

    def _kill_engine(self) -> None:
        self._transport.killed = True
        self._transport.wake()
        self._loop.join(20)
        assert not self._loop.is_alive()
        self._transport.close()  # not by the loop's own thread, which may end before the wake above

    def wait_ready(self) -> None:
        """Wait until the client is connected to the engine that runs now. Shortly after a restart, /health still
        answers for the one that died."""
        for _ in range(4000):
            welcome = self.client.welcome
            connected = welcome is not None and welcome.boot_id == self.engine.boot_id
            if connected and self.http.get("/health").status_code == 200:
                return
            time.sleep(0.005)
        raise AssertionError("never connected")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def pass_time(self, seconds: float) -> None:
        self.skew_s += seconds
        self._transport.wake()

    def holds(self) -> list[dict[str, Any]]:
        return self.http.get("/v1/is_paused").json()["result"]["holds"]

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._api.join(20)
        self.http.close()
        self._kill_engine()
        ipc_dir.remove(self._folder)


@contextlib.contextmanager
def real_server(**options: Any) -> Iterator[RealServer]:
    server = RealServer(**options)
    try:
        yield server
    finally:
        server.close()


class Wire:
    """A TCP proxy at ``url`` before a server. ``cut`` breaks all open connections. Each new connection takes the next
    of ``budgets``: the number of bytes after which its reply breaks off (None: never)."""

    def __init__(self, target: str, budgets: Sequence[int | None] = ()):
        self._host, port = target.removeprefix("http://").split(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._budgets = list(budgets)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = self._budgets.pop(0) if self._budgets else None
        try:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, up_writer, None))
                group.create_task(_pump(up_reader, writer, budget))
        except* (ConnectionError, OSError):
            pass
        finally:
            for end in (writer, up_writer):
                end.transport.abort()
                self._writers.discard(end)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None) -> None:
    while data := await reader.read(65536):
        if budget is not None:
            data, budget = data[:budget], budget - len(data)
        writer.write(data)
        await writer.drain()
        if budget is not None and budget <= 0:
            raise ConnectionResetError
    raise ConnectionResetError
