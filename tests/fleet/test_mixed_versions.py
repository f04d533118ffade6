"""A fleet whose members run two versions of the package: what all know is taken, everything else is refused."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from e2e.server import until
from fastdeploy.engine import common_engine
from fastdeploy.inter_communicator.known_messages import known_messages
from fleet.fake_fleet import FakeFleet, fake_fleet
from support.fake_runner import expected_tokens

BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 5}


def old_version() -> dict[str, dict[str, bool]]:
    known = deepcopy(known_messages())
    del known["SleepArgs"], known["PauseArgs"]["ttl_s"], known["SamplingParams"]["min_p"]
    return known


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2, restarts=True) as fleet:
        yield fleet


def restart_as(fleet: FakeFleet, i: int, known: dict[str, dict[str, bool]], version: str) -> None:
    """Start an engine anew that says that it has this version and knows so much."""
    name = f"replica-{i}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_engine, "known_messages", lambda: known)
        patch.setattr(common_engine, "VERSION", version)
        fleet.launcher.revive(name)
        until(lambda: fleet.replica(name).software == version, 20, "the other version is connected")


def entries(fleet: FakeFleet) -> list[dict[str, Any]]:
    return fleet.http.get("/v1/replicas").json()["replicas"]


def test_a_mixed_fleet_takes_what_all_members_know_and_names_who_lacks_the_rest(fleet):
    restart_as(fleet, 1, old_version(), "0.1.0")
    fleet.wait_members(2)
    assert [entry["software"] for entry in entries(fleet)] == [common_engine.VERSION, "0.1.0"]
    assert [entry["cannot"] for entry in entries(fleet)] == [
        [],
        ["SamplingParams.min_p", "PauseArgs.ttl_s", "SleepArgs"],
    ]

    for path, body, missing in (
        ("/v1/pause", {"mode": "keep", "ttl_s": 60}, "PauseArgs.ttl_s"),
        ("/v1/sleep", {}, "SleepArgs"),
        ("/v1/completions", BODY | {"prompt": [1], "min_p": 0.5}, "SamplingParams.min_p"),
    ):
        reply = fleet.http.post(path, json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (409, "fleet_mixed")
        assert error["cannot"] == {"replica-1": [missing]} and "replica-1 (version 0.1.0)" in error["message"]
    assert not any(engine.engine.pause.is_paused for engine in fleet.engines), "nothing has changed"

    for i in range(8):
        reply = fleet.http.post("/v1/completions", json=BODY | {"prompt": [i]})
        assert reply.json()["choices"][0]["token_ids"] == expected_tokens([i], 5)
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    assert all(engine.engine.pause.is_paused for engine in fleet.engines)
    assert fleet.http.post("/v1/resume").status_code == 200

    restart_as(fleet, 1, known_messages(), common_engine.VERSION)
    fleet.wait_members(2)
    assert fleet.http.post("/v1/pause", json={"mode": "keep", "ttl_s": 60}).status_code == 200


def test_a_version_that_cannot_be_led_does_not_join(fleet):
    known = old_version()
    del known["LeadArgs"]
    restart_as(fleet, 1, known, "0.0.1")
    until(lambda: "LeadArgs" in entries(fleet)[1]["why"], 20, "the reason")
    assert [entry["state"] for entry in entries(fleet)] == ["member", "joining"]
