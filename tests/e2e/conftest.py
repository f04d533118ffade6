"""A server that tests share and restore, and servers for tests that kill processes or need flags of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import PROMPT, SMALL, Server, perturbed


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Return a server with two API servers. A test must leave the server resumed and idle, with its first weights."""
    with Server("--workers", "2", *SMALL) as server:
        yield server
        server.stop()


@pytest.fixture
def live(server: Server) -> Iterator[Server]:
    """Return the shared server. It is awake, running and idle again after the test."""
    yield server
    for path in ("/wake_up", "/abort_requests", "/resume"):
        server.post(path)


@pytest.fixture
def to_update(server: Server) -> Iterator[Server]:
    """Return the shared server, for a test that changes its weights. The first weights are restored afterwards."""
    before = server.weights(checksums=True)
    yield server
    server.reset()
    assert server.weights(checksums=True)["checksum"] == before["checksum"]


@pytest.fixture(scope="session")
def alone(server: Server) -> list[int]:
    """Return the 2500 greedy tokens after PROMPT of an undisturbed run."""
    return server.complete(PROMPT, max_tokens=2500, ignore_eos=True)["token_ids"]


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint with other weights."""
    return perturbed(tmp_path_factory.mktemp("weights") / "policy-1")


@pytest.fixture(scope="session")
def on_new_weights(new_weights: Path) -> Any:
    """Return the greedy completion of PROMPT, 40 tokens, of a server that was started on ``new_weights``."""
    with Server(*SMALL, "--model", str(new_weights)) as fresh:
        return fresh.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="session")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server where two requests may wait and a silent stream gets a comment after 0.2 s. Weights come from
    its ``model_root`` only."""
    root = tmp_path_factory.mktemp("root")
    with Server(*SMALL, "--max-waiting", "2", "--keepalive-s", "0.2", "--model-root", str(root)) as server:
        server.model_root = root
        yield server


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """Return ``start_server(*flags)``. The servers are removed after the test."""
    with contextlib.ExitStack() as servers:
        yield lambda *flags: servers.enter_context(Server(*SMALL, *flags))
