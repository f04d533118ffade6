"""A real uvicorn server on a real socket before a fake engine. Its fixtures are there for every test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import uvloop

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.tokenizer import Tokenizer, load_tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.entrypoints.ports import Port, ports_of, with_ports
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from support.fake_engine_server import FakeEngine
from support.tiny_tokenizer import save_tokenizer
from support.uvicorn_ticks import shorten_ticks


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(model_dir) -> Tokenizer:
    return load_tokenizer(model_dir)


class Server:
    """One API server in a thread. ``url`` is its address, ``control_url`` that of its control port, if it has one.

    It is bound to loopback, whatever ``config.host`` says."""

    def __init__(self, endpoint: str, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys, port: int = 0):
        ports = [Port.open("127.0.0.1", port if name == "port" else 0) for name in ports_of(config)]
        self._listeners = [port.sockets[0] for port in ports]
        config = with_ports(config, ports)
        urls = [port.url for port in ports]
        self.urls = dict(zip(ports_of(config), urls, strict=True))
        self.url, self.control_url = urls[0], self.urls.get("control_port", urls[0])
        self._keys = keys
        self._config = config
        self._tokenizer = tokenizer
        self._endpoint = endpoint
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._made.wait()
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def _run(self) -> None:
        from fastdeploy.entrypoints.api_server import make_server  # FastAPI: not for runs that start no server

        shorten_ticks()

        async def serve() -> None:
            self.client = EngineClient(ZmqConnector(self._endpoint), self._config.stall_s)
            faults = None
            if self._config.faults:
                from fastdeploy.faults.server import ServerFaults

                faults = ServerFaults(self._config, self.client)
            self._server = make_server(self.client, self._tokenizer, self._config, self._keys, faults)
            self._made.set()
            await self._server.serve(sockets=self._listeners)

        uvloop.run(serve())

    def all_taken(self) -> bool:
        """Every reader has taken the outputs that came for it."""
        return not any(stream._outputs for stream in tuple(self.client._streams.values()))

    def wait_connected(self) -> None:
        end = time.monotonic() + 60.0
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < end, f"never connected: {self.client.missing_because}"
            time.sleep(0.002)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.http.close()


class Stack:
    """Fake engine and API server; ``restart_engine`` replaces the engine on the same socket, ``restart_server`` the API
    server on the same port."""

    def __init__(self, endpoint: str, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys, **engine):
        self._endpoint = endpoint
        self._args = (endpoint, tokenizer, config, keys)
        self.server = Server(*self._args)
        self.restart_engine(**engine)
        self.server.wait_connected()

    @property
    def http(self) -> httpx.Client:
        return self.server.http

    def post(self, path: str, **body) -> httpx.Response:
        return self.server.post(path, **body)

    def script(self, script) -> None:
        self.engine._script = script

    def restart_engine(self, **fields) -> None:
        self.engine = FakeEngine(self._endpoint, **fields)
        self.engine.taken = self.server.all_taken

    def restart_server(self) -> None:
        port = self.server.http.base_url.port
        self.server.stop()
        self.server = Server(*self._args, port=port or 0)
        self.engine.taken = self.server.all_taken
        self.server.wait_connected()

    def close(self) -> None:
        self.server.stop()
        self.engine.die()


@contextlib.contextmanager
def stacks(model_dir: str, tokenizer: Tokenizer) -> Iterator[Callable[..., Stack]]:
    paths, made, own = [], [], tokenizer

    def make(
        with_tokenizer: bool = True,
        keys: Keys = NO_KEYS,
        tokenizer: Tokenizer | None = None,
        engine: Mapping[str, Any] = {},
        **settings,
    ) -> Stack:
        """Return a stack. engine: settings of the fake engine."""
        config = ServeConfig(model=model_dir, served_model_name="tiny", **settings)
        used = (tokenizer or own) if with_tokenizer else None
        paths.append(ipc_dir.create())
        made.append(Stack(ipc_dir.endpoint(paths[-1]), used, config, keys, **engine))
        return made[-1]

    yield make
    for stack in made:
        stack.close()
    for path in paths:
        ipc_dir.remove(path)


@pytest.fixture
def make_stack(model_dir, tokenizer) -> Iterator[Callable[..., Stack]]:
    with stacks(model_dir, tokenizer) as make:
        yield make


@pytest.fixture
def stack(make_stack) -> Stack:
    return make_stack()


@pytest.fixture(scope="module")
def make_module_stack(model_dir, tokenizer) -> Iterator[Callable[..., Stack]]:
    with stacks(model_dir, tokenizer) as make:
        yield make


@pytest.fixture(scope="module")
def module_stack(make_module_stack) -> Stack:
    """For tests that leave the engine as they found it."""
    return make_module_stack()
