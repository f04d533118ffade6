"""A request whose replica is lost goes on elsewhere, and its client sees no error."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from e2e.server import until
from fleet.fake_fleet import FakeEngine, FakeFleet, fake_fleet
from support.fake_runner import expected_tokens

BODY = {"ignore_eos": True, "return_token_ids": True, "temperature": 1.0}


@pytest.fixture
def fleet():
    with fake_fleet(2, runner={"step_s": 0.004}) as fleet:
        yield fleet


class Asked:
    """A completion that is asked for on another thread."""

    def __init__(self, fleet: FakeFleet, **body: Any):
        self._thread = threading.Thread(target=self._ask, args=(fleet, BODY | body), daemon=True)
        self._thread.start()

    def _ask(self, fleet: FakeFleet, body: dict[str, Any]) -> None:
        self._reply = fleet.http.post("/v1/completions", json=body)

    def reply(self) -> dict[str, Any]:
        self._thread.join(30)
        assert self._reply.status_code == 200, self._reply.text
        return self._reply.json()


def busy(fleet: FakeFleet, tokens: int = 4) -> FakeEngine:
    """Return the engine of the only request, once each of its choices has ``tokens`` tokens."""

    def found() -> list[FakeEngine]:
        return [e for e in fleet.engines if (r := e.engine.scheduler.running) and r[0].num_output_tokens >= tokens]

    until(found, 20, "the request runs")
    return found()[0]


def lose(fleet: FakeFleet, engine: FakeEngine) -> None:
    """Kill an engine, and start it again when the gateway has noticed."""
    engine.kill()
    until(lambda: not fleet.client.membership.replicas[engine.name].in_quorum, 20, "noticed")
    engine.start()


def test_every_choice_goes_on_with_the_tokens_of_an_undisturbed_run(fleet):
    asked = Asked(fleet, prompt=[1, 2, 3], max_tokens=60, n=3, logprobs=1)
    busy(fleet).kill()
    choices = asked.reply()["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected_tokens([1, 2, 3], 60)] * 3
    assert all(len(choice["logprobs"]["token_logprobs"]) == 60 for choice in choices)
    assert all(choice["finish_reason"] == "length" for choice in choices)
    assert [(s["start"], s["end"]) for s in choices[0]["weight_versions"]][-1][1] == 60
    assert [choice["num_preempted"] for choice in choices] == [1, 1, 1]
    assert all(replica.load == replica.in_flight == 0 for replica in fleet.client.membership.replicas.values())
    assert fleet.client._relays == {} and fleet.client._by_client_id == {}


def test_a_request_that_loses_its_replica_three_times_ends_once(fleet):
    asked = Asked(fleet, prompt=[4, 5], max_tokens=100)
    for tokens in (3, 2, 2):
        lose(fleet, busy(fleet, tokens))
        fleet.wait_members(2)
    [choice] = asked.reply()["choices"]
    assert choice["token_ids"] == expected_tokens([4, 5], 100) and choice["num_preempted"] == 3
