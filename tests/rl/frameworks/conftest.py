"""A server with the embedded model in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A test leaves the server with any weights of the embedded model's shapes, under any version, and not paused."""
    server = Server("--dtype", "float32", "--num-gpu-blocks-override", "2048").wait_ready()
    yield server
    server.stop()
    server.remove()
