"""Shortens the client's waits, since faults are scripted here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy.rl import connection, holds, server_state


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_state, "BACKOFF_S", 0.002)
        patch.setattr(connection, "RETRY_S", 0.01)
        patch.setattr(holds, "PERIOD", 0.002)  # a ttl of 60 s is renewed every 0.12 s
        yield
