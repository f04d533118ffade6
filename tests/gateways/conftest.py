"""Two servers, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.server import SMALL, Server


@pytest.fixture(scope="package")
def servers() -> Iterator[list[Server]]:
    """Return two servers. A test must leave them resumed and idle."""
    with Server(*SMALL) as first, Server(*SMALL) as second:
        yield [first, second]
