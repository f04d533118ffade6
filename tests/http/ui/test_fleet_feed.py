"""The stream of /ui at a gateway: all replicas as if they were one engine, or one of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.server import in_background, until
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


def test_every_message_lists_the_replicas_and_shows_all_of_them_as_one(fleet):
    with watching(fleet) as messages:
        for message in (next(messages), next(messages)):
            assert [(r["name"], r["state"], r["version"]) for r in message["replicas"]] == [
                ("replica-0", "member", "0"),
                ("replica-1", "member", "0"),
            ]
            assert message["replica"] == "" and message["state"]["boot_id"] == fleet.client.membership.boot_id


@contextlib.contextmanager
def frozen(fleet: FakeFleet, num: int) -> Iterator[None]:
    """Let ``num`` requests stand in the batches of the fleet, with a few tokens each, in the block."""
    body = {"max_tokens": 40, "ignore_eos": True}
    for engine in fleet.engines:
        engine.runner.pace_s = 0.02
    replies = [in_background(fleet.http.post, "/v1/completions", json=body | {"prompt": [i]}) for i in range(num)]
    running = lambda: [r for e in fleet.engines if e.alive for r in e.engine.scheduler.running]  # noqa: E731
    until(lambda: len(running()) == num and all(r.num_output_tokens for r in running()), 20, "all run")
    assert fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "h"}).status_code == 200
    yield
    for engine in fleet.engines:
        engine.runner.pace_s = 0.0
    assert fleet.http.post("/v1/resume", json={"hold_id": "h"}).status_code == 200
    assert all(reply.result(20).status_code == 200 for reply in replies)


def wait_for(messages: Iterator[dict[str, Any]], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return next(message for message in messages if message["state"] is not None and condition(message))


def test_figures_and_requests_are_those_of_all_replicas_and_of_one_if_it_is_chosen(fleet):
    with frozen(fleet, 6):
        with watching(fleet) as messages:
            message = wait_for(messages, lambda message: "requests" in message)
        state = message["state"]
        assert state["counts"] == {"running": 0, "frozen": 6, "waiting": 0} and state["phase"] == "paused"
        names = sorted(request["name"].split(": ")[0] for request in message["requests"])
        assert names == ["replica-0"] * 3 + ["replica-1"] * 3
        assert sorted(state["progress"]) == sorted(request["name"] for request in message["requests"])
        assert [hold["id"] for hold in state["holds"]] == ["h"]
        alone = []
        for name in ("replica-0", "replica-1"):
            with watching(fleet, f"?replica={name}") as messages:
                alone.append(next(messages)["state"])
        assert [one["counts"]["frozen"] for one in alone] == [3, 3]
        for key in ("used", "total", "queried_tokens"):
            assert state["kv"][key] == sum(one["kv"][key] for one in alone)


def test_events_of_requests_come_from_all_replicas_and_those_of_a_pause_once(fleet):
    """And the tokens of all are counted."""
    made = lambda: sum(engine.engine.metrics.num_tokens for engine in fleet.engines)  # noqa: E731
    with watching(fleet) as messages:
        made_before, counted_before = made(), next(messages)["state"]["tokens"]
        with frozen(fleet, 6):
            pass
        counted = lambda message: message["state"]["tokens"] - counted_before  # noqa: E731
        events: list[list[Any]] = []
        for message in messages:
            events += message["events"]
            if counted(message) == made() - made_before and sum(kind == "final" for _, kind, _, _ in events) == 6:
                break
    finals = sorted(name.split(": ")[0] for _, kind, name, _ in events if kind == "final")
    assert sorted(finals) == ["replica-0"] * 3 + ["replica-1"] * 3
    assert [fields["hold_id"] for _, kind, _, fields in events if kind == "held"] == ["h"]


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


def test_a_lost_replica_takes_its_requests_with_it_and_no_token_is_counted_back():
    with fake_fleet(2) as fleet, frozen(fleet, 4), watching(fleet) as messages:
        before = wait_for(messages, lambda message: len(message.get("requests", [])) == 4)
        fleet.engines[0].kill()
        after = wait_for(messages, lambda message: message["state"]["counts"]["frozen"] < 4 and "requests" in message)
        assert after["replicas"][0]["state"] != "member"
        assert {request["name"].split(": ")[0] for request in after["requests"]} == {"replica-1"}
        assert after["state"]["tokens"] == before["state"]["tokens"]
        assert after["state"]["boot_id"] == before["state"]["boot_id"], "the fleet has its weights all the time"


def test_a_chosen_replica_that_is_lost_is_shown_as_lost():
    with fake_fleet(2) as fleet, watching(fleet, "?replica=replica-1") as messages:
        assert next(messages)["state"] is not None
        fleet.engines[1].kill()
        message = next(message for message in messages if message["state"] is None)
        assert message["error"] and message["replica"] == "replica-1"
        assert [r["name"] for r in message["replicas"]] == ["replica-0", "replica-1"]
