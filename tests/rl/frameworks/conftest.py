"""A server, or a fleet, with the embedded model in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.fleet_server import KINDS, server_of
from e2e.server import Server


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A test leaves the server with any weights of the embedded model's shapes, under any version, and not paused."""
    with server_of(request.param, "--dtype", "float32", "--num-gpu-blocks-override", "2048") as server:
        yield server
