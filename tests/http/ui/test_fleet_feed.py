"""The stream of /ui at a gateway: the state of all replicas, and what happens in one of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.server import until
from fleet.fake_fleet import FakeFleet, fake_fleet


@pytest.fixture(scope="module")
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2) as fleet:
        yield fleet


@contextlib.contextmanager
def watching(fleet: FakeFleet, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    """Open the stream, and give its messages."""
    with fleet.http.stream("GET", f"/ui/events{query}") as stream:
        assert stream.status_code == 200
        yield (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))


def boot_id(fleet: FakeFleet, i: int) -> str:
    return fleet.engines[i].engine.boot_id


def test_every_message_lists_the_replicas_and_names_the_one_that_is_shown(fleet):
    with watching(fleet) as messages:
        for message in (next(messages), next(messages)):
            assert [(r["name"], r["state"], r["version"]) for r in message["replicas"]] == [
                ("replica-0", "member", "0"),
                ("replica-1", "member", "0"),
            ]
            assert message["replica"] == "replica-0" and message["state"]["boot_id"] == boot_id(fleet, 0)


def test_a_viewer_may_choose_the_replica(fleet):
    with watching(fleet, "?replica=replica-1") as messages:
        message = next(messages)
        assert message["replica"] == "replica-1" and message["state"]["boot_id"] == boot_id(fleet, 1)
        assert "requests" in message


def test_an_unknown_replica_is_named(fleet):
    reply = fleet.http.get("/ui/events", params={"replica": "replica-9"})
    assert reply.status_code == 404 and "replica-9" in reply.json()["error"]["message"]


def test_a_server_of_its_own_has_no_replicas_to_choose(module_stack):
    reply = module_stack.http.get("/ui/events", params={"replica": "replica-0"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "replica"


def test_a_viewer_who_named_no_replica_sees_another_one_when_the_first_is_lost():
    with fake_fleet(2) as fleet, watching(fleet) as messages:
        assert next(messages)["replica"] == "replica-0"
        fleet.engines[0].kill()
        last: dict[str, Any] = {}

        def moved() -> bool:
            last.update(next(messages))
            return last["replica"] == "replica-1" and last["state"] is not None

        until(moved, 20, "the other replica is shown")
        assert last["state"]["boot_id"] == boot_id(fleet, 1) and last["replicas"][0]["state"] != "member"


def test_a_chosen_replica_that_is_lost_is_shown_as_lost():
    with fake_fleet(2) as fleet, watching(fleet, "?replica=replica-1") as messages:
        assert next(messages)["state"] is not None
        fleet.engines[1].kill()
        message = next(message for message in messages if message["state"] is None)
        assert message["error"] and message["replica"] == "replica-1"
        assert [r["name"] for r in message["replicas"]] == ["replica-0", "replica-1"]
