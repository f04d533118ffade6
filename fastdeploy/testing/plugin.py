"""The pytest plugin. Fixtures: servers of a real engine, shared by the tests of a process and reset before each.

    def test_a_rollout(fastdeploy_server):
        client = OpenAI(base_url=fastdeploy_server.url + "/v1", api_key="none")

Settings, in the ini file: ``fastdeploy_model`` and ``fastdeploy_flags``. Each worker of pytest-xdist has its own
servers. The report of a failed test has what the servers have written into their logs during the test.

Imports only pytest, since pytest imports this file in every run. ``-p no:fastdeploy`` turns it off.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fastdeploy.testing.server import Server

FLEET_SIZE = 2
LOG_CHARACTERS = 4000  # of a log in a report
Serve = Callable[..., "Server"]


class Servers:
    """The running servers of this process. log_sizes: bytes that each log had when the test began."""

    def __init__(self) -> None:
        self._shared: dict[tuple[Any, ...], Server] = {}
        self.log_sizes: dict[Server, int] = {}

    def start(self, model: str | Path | None = None, *flags: str, **settings: Any) -> Server:
        """Start a server and return it when it is ready. Arguments: of serve."""
        from fastdeploy.testing.server import serve

        server = serve(model, *flags, **settings)
        server.__enter__()
        self.log_sizes[server] = 0
        return server

    def shared(self, model: str | Path | None = None, *flags: str, replicas: int = 0) -> Server:
        """Return a server with these settings as it is after its start: the one that runs already, or a new one."""
        key = (model, flags, replicas)
        server = self._shared.pop(key, None)
        if server is None or not self._reset(server):
            server = self.start(model, *flags, replicas=replicas)
        self._shared[key] = server
        return server

    def _reset(self, server: Server) -> bool:
        """Reset a server, and return whether it still runs: the test before may have ended it. If it is not clean, end
        it, so that the next test gets a clean one."""
        try:
            server.reset()
            return True
        except BaseException:
            has_ended = server.poll() is not None
            self.end(server)
            if not has_ended:
                raise
            return False

    def end(self, *servers: Server) -> None:
        """Stop these servers."""
        for server in servers:
            server.send_signal(15)
        for server in servers:
            self.log_sizes.pop(server, None)
            server.__exit__()

    def end_all(self) -> None:
        """Stop all servers."""
        self.end(*self.log_sizes)
        self._shared.clear()


SERVERS = pytest.StashKey[Servers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("fastdeploy_model", "of fastdeploy_server and fastdeploy_fleet: a folder or a name; the embedded one")
    parser.addini("fastdeploy_flags", "of fastdeploy_server and fastdeploy_fleet: flags of `fastdeploy serve`", "args")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SERVERS] = Servers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    sizes = item.config.stash[SERVERS].log_sizes
    for server in sizes:
        sizes[server] = server.log_size()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server, size in item.config.stash[SERVERS].log_sizes.items():
            if text := server.log(size)[-LOG_CHARACTERS:]:
                report.sections.append((f"log of FastDeploy at {server.url}", text))
    return report


@pytest.fixture(scope="session")
def fastdeploy_shared(pytestconfig: pytest.Config) -> Iterator[Serve]:
    """Return ``fastdeploy_shared(model=None, *flags, replicas=0)``: a running server, or a fleet, that is started once
    in a session for the same arguments, and reset by each call."""
    servers = pytestconfig.stash[SERVERS]
    yield servers.shared
    servers.end_all()


@pytest.fixture(scope="session")
def fastdeploy_settings(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Return the model ("" = the embedded one) and the flags of fastdeploy_server and fastdeploy_fleet. Those of the
    ini file; a conftest may have a fixture of this name with others."""
    return (pytestconfig.getini("fastdeploy_model"), *pytestconfig.getini("fastdeploy_flags"))


@pytest.fixture
def fastdeploy_server(fastdeploy_shared: Serve, fastdeploy_settings: tuple[str, ...]) -> Server:
    """Return a fastdeploy.testing.Server that the tests share, as it is after its start."""
    return fastdeploy_shared(fastdeploy_settings[0] or None, *fastdeploy_settings[1:])


@pytest.fixture
def fastdeploy_fleet(fastdeploy_shared: Serve, fastdeploy_settings: tuple[str, ...]) -> Server:
    """Return a fleet of two replicas that the tests share, as it is after its start."""
    return fastdeploy_shared(fastdeploy_settings[0] or None, *fastdeploy_settings[1:], replicas=FLEET_SIZE)


@pytest.fixture
def fastdeploy_serve(pytestconfig: pytest.Config) -> Iterator[Serve]:
    """Return ``fastdeploy_serve(model=None, *flags, replicas=0, **settings)``, which starts a server, or a fleet, that
    ends with the test. settings: see fastdeploy.testing.serve."""
    servers, own = pytestconfig.stash[SERVERS], []

    def start(*arguments: Any, **settings: Any) -> Server:
        own.append(servers.start(*arguments, **settings))
        return own[-1]

    yield start
    servers.end(*own)
