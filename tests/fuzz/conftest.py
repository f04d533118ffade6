"""The server that all fuzz tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.fuzzed_server import FuzzedServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory) -> Iterator[FuzzedServer]:
    server = FuzzedServer(tmp_path_factory.mktemp("weights"))
    yield server
    server.close()


@pytest.fixture
def server(shared_server: FuzzedServer) -> Iterator[FuzzedServer]:
    """The fuzzed server. After each test its state is restored, or the test fails."""
    yield shared_server
    shared_server.restore()
