"""The gateway serves as one engine does: requests, and control calls over all replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.fake_fleet import FakeFleet, fake_fleet
from support.fake_runner import expected_tokens


@pytest.fixture(scope="module")
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(3) as fleet:
        yield fleet


def test_requests_are_spread_and_answered(fleet):
    body = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    for i in range(6):
        reply = fleet.http.post("/v1/completions", json=body | {"prompt": [i, 7]}).json()
        assert reply["choices"][0]["token_ids"] == expected_tokens([i, 7], 5)


def test_a_pause_reaches_every_engine(fleet):
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).json()["result"]["status"]
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.http.post("/v1/resume").status_code == 200
    assert not any(engine.engine.pause.is_paused for engine in fleet.engines)
