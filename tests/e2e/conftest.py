"""One server shared by the tests that restore its state, and a maker of servers for tests that kill processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import PROMPT, SMALL, Server, perturbed
from fastdeploy.embedded import MODEL_DIR


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model behind two API servers. A test must leave it resumed and idle, with the weights it had."""
    server = Server("--workers", "2", *SMALL).wait_ready()
    yield server
    server.stop()
    server.remove()


@pytest.fixture
def to_update(server: Server) -> Iterator[Server]:
    """The server that all share, for a test that changes its weights: afterwards it has those of its start again."""
    before = server.weights(checksums=True)
    yield server
    server.post("/v1/reset", {})
    if server.weights()["weight_epoch"] != before["weight_epoch"]:
        server.post("/v1/update_weights", {"model_path": str(MODEL_DIR), "version": before["version"]})
    assert server.weights(checksums=True)["checksum"] == before["checksum"]


@pytest.fixture(scope="session")
def alone(server: Server) -> list[int]:
    """2500 greedy tokens after PROMPT, of a run that nothing disturbs."""
    return server.complete(PROMPT, max_tokens=2500, ignore_eos=True)["token_ids"]


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with other weights."""
    return perturbed(tmp_path_factory.mktemp("weights") / "policy-1")


@pytest.fixture(scope="session")
def on_new_weights(new_weights: Path) -> Any:
    """Greedy completion of PROMPT, 40 tokens, by a server that was started on ``new_weights``."""
    fresh = Server(*SMALL, "--model", str(new_weights)).wait_ready()
    try:
        return fresh.complete(PROMPT, max_tokens=40, ignore_eos=True, logprobs=0)
    finally:
        fresh.remove()


@pytest.fixture(scope="session")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two requests may wait, a silent stream gets a comment after 0.2 s, and weights come from ``model_root`` only."""
    root = tmp_path_factory.mktemp("root")
    server = Server(*SMALL, "--max-waiting", "2", "--keepalive-s", "0.2", "--model-root", str(root)).wait_ready()
    server.model_root = root
    yield server
    server.remove()


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
