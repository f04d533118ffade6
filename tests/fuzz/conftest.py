"""The server that all fuzz tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.victim import Victim


@pytest.fixture(scope="session")
def shared_victim(tmp_path_factory) -> Iterator[Victim]:
    victim = Victim(tmp_path_factory.mktemp("weights"))
    yield victim
    victim.close()


@pytest.fixture
def victim(shared_victim: Victim) -> Iterator[Victim]:
    """The fuzzed server. After each test its state is restored, or the test fails."""
    yield shared_victim
    shared_victim.restore()
