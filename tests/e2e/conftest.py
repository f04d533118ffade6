"""One server shared by the tests that restore its state, and a maker of servers for tests that kill processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from e2e.server import Server

SMALL = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "2048")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model behind two API servers. A test must leave the server resumed and idle."""
    server = Server("--workers", "2", *SMALL).wait_ready()
    yield server
    server.stop()
    server.kill_everything()
    shutil.rmtree(server.ipc_root)
    server.log_path.unlink()


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """Start a server for one test by ``start_server(*flags)``; stop it after the test."""
    made: list[Server] = []

    def start(*flags: str, ready: bool = True, env: dict[str, str] | None = None) -> Server:
        made.append(Server(*SMALL, *flags, env=env))
        return made[-1].wait_ready() if ready else made[-1]

    yield start
    for server in made:
        server.remove()
