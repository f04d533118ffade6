"""A request whose replica is lost goes on elsewhere, and its client sees no error."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from e2e.server import in_background, until
from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.client.pace import Pace
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import StaticLauncher
from fastdeploy.fleet.replica import ReplicaEvent
from fleet.fake_fleet import FakeEngine, FakeFleet, FakeGateway, fake_fleet
from support.fake_runner import EXPERTS, expected_rows, expected_tokens, write_adapter

BODY = {"ignore_eos": True, "return_token_ids": True, "temperature": 1.0}
SLOW_S = 0.05  # of a step, until a test waits for the reply: no request ends before the test has disturbed it


@pytest.fixture
def fleet():
    with fake_fleet(2, runner={"step_s": SLOW_S}) as fleet:
        yield fleet


class Asked:
    """A completion that is asked for on another thread."""

    def __init__(self, fleet: FakeFleet, **body: Any):
        self._fleet = fleet
        self._thread = threading.Thread(target=self._ask, args=(fleet, BODY | body), daemon=True)
        self._thread.start()

    def _ask(self, fleet: FakeFleet, body: dict[str, Any]) -> None:
        self._reply = fleet.http.post("/v1/completions", json=body)

    def reply(self) -> dict[str, Any]:
        for engine in self._fleet.engines:
            engine.runner.pace_s = 0.0
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


@pytest.mark.parametrize("how", ["is told to stop", "fails in a step"])
def test_a_request_goes_on_elsewhere_when_its_replica(how, fleet):
    asked = Asked(fleet, prompt=[1, 2, 3], max_tokens=60, n=2)
    engine = busy(fleet)
    if how == "fails in a step":
        engine.runner.fail_next = True
    else:
        engine.engine.stop()
    choices = asked.reply()["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected_tokens([1, 2, 3], 60)] * 2
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]


def test_a_request_that_loses_its_replica_three_times_ends_once(fleet):
    asked = Asked(fleet, prompt=[4, 5], max_tokens=100)
    for tokens in (3, 2, 2):
        lose(fleet, busy(fleet, tokens))
        fleet.wait_members(2)
    [choice] = asked.reply()["choices"]
    assert choice["token_ids"] == expected_tokens([4, 5], 100) and choice["num_preempted"] == 3


def test_a_request_that_was_moved_is_found_by_an_abort(fleet):
    asked = Asked(fleet, prompt=[1, 2], max_tokens=120, request_id="mine", n=2)
    busy(fleet).kill()
    engine = next(engine for engine in fleet.engines if not engine._transport.killed)
    until(lambda: len(engine.engine.scheduler.running) == 2, 20, "both choices went on")
    busy(fleet, 1)
    report = fleet.http.post("/v1/abort_requests", json={"req_ids": ["mine"]}).json()["result"]
    choices = asked.reply()["choices"]
    assert [entry["request_id"] for entry in report["aborted"]] == ["mine"] and not report["not_found"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    for choice in choices:
        assert choice["token_ids"] == expected_tokens([1, 2], len(choice["token_ids"]))


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/reset", {}), ("/v1/abort_requests", {"abort_all": True}), ("/v1/pause", {"mode": "abort"})]
)
def test_a_call_that_ends_requests_ends_those_of_a_replica_that_hangs(path, body):
    config = FleetConfig(fleet_id="fleet-1", fence_after_s=0.5)
    with fake_fleet(2, runner={"step_s": SLOW_S}, config=config) as fleet:
        asked = Asked(fleet, prompt=[1, 2], max_tokens=120, request_id="mine")
        busy(fleet).stop()
        reply = fleet.http.post(path, json=body)
        report = reply.json()["result"]
        [choice] = asked.reply()["choices"]
    assert reply.status_code == 200 and "fenced" in [entry["status"] for entry in report["replicas"]]
    count = len(choice["token_ids"])
    assert choice["finish_reason"] == "abort" and choice["token_ids"] == expected_tokens([1, 2], count)
    told = {
        "/v1/reset": lambda: report["aborted"] == 1,
        "/v1/abort_requests": lambda: report["aborted"] == [{"request_id": "mine", "output_token_count": count}],
        "/v1/pause": lambda: (report["aborted_ids"], report["tokens_returned"]) == (["mine"], count),
    }
    assert told[path]()


def load(fleet: FakeFleet, folder: Path, content: str) -> dict[str, Any]:
    """Load an adapter as "alice", and return the report."""
    body = {"lora_name": "alice", "lora_path": write_adapter(folder / content, content)}
    reply = fleet.http.post("/v1/adapters/load", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]


def unload(fleet: FakeFleet) -> None:
    assert fleet.http.post("/v1/adapters/unload", json={"lora_name": "alice"}).status_code == 200


def labels(choice: dict[str, Any]) -> list[int]:
    return [span["adapter_epoch"] for span in choice["weight_versions"]]


def test_a_request_of_an_unloaded_adapter_does_not_go_on_with_another_one_of_its_name(fleet, tmp_path):
    load(fleet, tmp_path, "a1")
    asked = Asked(fleet, model="alice", prompt=[1, 2, 3], max_tokens=100, n=2)
    engine = busy(fleet)
    unload(fleet)
    assert load(fleet, tmp_path, "a2")["adapter_epoch"] == 2
    engine.kill()
    for choice in asked.reply()["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "adapter_unloaded")
        assert choice["token_ids"] == expected_tokens([1, 2, 3], len(choice["token_ids"]), adapter=1)
        assert labels(choice) == [1]
    body = BODY | {"model": "alice", "prompt": [1, 2, 3], "max_tokens": 4}
    [choice] = fleet.http.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_ids"] == expected_tokens([1, 2, 3], 4, adapter=2) and labels(choice) == [2]


def test_a_request_of_an_unloaded_adapter_finishes_where_it_is(fleet, tmp_path):
    load(fleet, tmp_path, "a1")
    asked = Asked(fleet, model="alice", prompt=[1, 2, 3], max_tokens=20)
    busy(fleet)
    unload(fleet)
    load(fleet, tmp_path, "a2")
    [choice] = asked.reply()["choices"]
    assert choice["token_ids"] == expected_tokens([1, 2, 3], 20, adapter=1) and labels(choice) == [1]


def test_a_request_goes_on_elsewhere_with_the_adapter_that_replaced_its_own(fleet, tmp_path):
    load(fleet, tmp_path, "a1")
    asked = Asked(fleet, model="alice", prompt=[1, 2, 3], max_tokens=60)
    engine = busy(fleet)
    engine.stop()
    loading = in_background(load, fleet, tmp_path, "a2")
    until(lambda: fleet.client._control._runs, 20, "the load is sent")
    engine.kill()
    assert loading.result(30)["adapter_epoch"] == 2
    [choice] = asked.reply()["choices"]
    assert choice["finish_reason"] == "length" and labels(choice) == [1, 2]
    delivered = choice["weight_versions"][0]["end"]
    assert choice["token_ids"][:delivered] == expected_tokens([1, 2, 3], delivered, adapter=1)


def test_a_request_whose_replica_is_lost_in_a_reset_does_not_go_on_without_its_adapter(fleet, tmp_path):
    load(fleet, tmp_path, "a1")
    asked = Asked(fleet, model="alice", prompt=[1, 2, 3], max_tokens=60)
    engine = busy(fleet)
    engine.stop()
    resetting = in_background(fleet.http.post, "/v1/reset")
    until(lambda: fleet.client._control._runs, 20, "the reset is sent")
    engine.kill()
    assert resetting.result(30).status_code == 200
    [choice] = asked.reply()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "adapter_unloaded")
    assert choice["token_ids"] == expected_tokens([1, 2, 3], len(choice["token_ids"]), adapter=1)


def test_a_request_that_waits_for_a_replica_ends_with_the_unload_of_its_adapter(fleet, tmp_path):
    load(fleet, tmp_path, "a1")
    for engine in fleet.engines:
        fleet.replica(engine.name).advance(ReplicaEvent.DRAIN)
    asked = Asked(fleet, model="alice", prompt=[1, 2, 3], max_tokens=20)
    until(lambda: fleet.client._dispatcher.num_waiting, 20, "it waits")
    unload(fleet)
    [choice] = asked.reply()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "adapter_unloaded")
    assert choice["token_ids"] == [] and fleet.client._dispatcher.num_waiting == 0


def test_the_rest_of_a_choice_draws_the_same_random_numbers(fleet):
    asked = Asked(fleet, prompt=[1, 2, 3], max_tokens=60, min_tokens=50, n=2, first_choice=5, prompt_logprobs=0)
    first = busy(fleet)
    before = first.engine.scheduler.running[0].group.add
    first.kill()
    engine = next(engine for engine in fleet.engines if engine is not first)
    until(lambda: len(engine.engine.scheduler.running) == 2, 20, "both choices went on")
    requests = sorted(engine.engine.scheduler.running, key=lambda r: r.key[1])
    rest = [request.group.add for request in requests]
    assert before.sampling.seed is not None and before.first_choice == 5
    for k, add in enumerate(rest):
        done = add.resumed_tokens
        assert done >= 1 and add.first_choice == 5 + k and add.n == 1
        assert add.prompt_token_ids == [1, 2, 3] + expected_tokens([1, 2, 3], done)
        assert (add.sampling.seed, add.sampling.prompt_logprobs) == (before.sampling.seed, None)
        assert (add.sampling.max_tokens, add.sampling.min_tokens) == (60 - done, max(50 - done, 0))
    choices = asked.reply()["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected_tokens([1, 2, 3], 60)] * 2
    assert len(choices[0]["prompt_logprobs"]) == 3


def test_each_choice_has_all_rows_of_its_experts_once_though_its_replica_was_lost():
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, routed_experts=True)
    add = AddRequest("r", [1, 2, 3], sampling, n=2)

    async def choices(client: FleetClient) -> list[Choice]:
        request = GenerationRequest([add], [TextOptions()], streams=True)
        async with Generation(client, None, request, Pace(asyncio.Lock())) as generation:
            while not generation.finished:
                await generation.step()
        return generation.choices

    with fake_fleet(2, runner={"step_s": SLOW_S, "experts": EXPERTS}) as fleet:
        future = asyncio.run_coroutine_threadsafe(choices(fleet.client), fleet.loop)
        busy(fleet).kill()
        for engine in fleet.engines:
            engine.runner.pace_s = 0.0
        for choice in future.result(30):
            assert choice.token_ids == expected_tokens([1, 2, 3], 60) and choice.num_preempted == 1
            assert choice.routed_experts.data == expected_rows([1, 2, 3, *choice.token_ids], EXPERTS)


def test_a_request_without_a_token_is_sent_again_as_it_was(fleet):
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    asked = Asked(fleet, prompt=[1, 2], max_tokens=5, request_id="mine", n=3, prompt_logprobs=0)
    until(lambda: any(len(e.engine.scheduler.waiting) for e in fleet.engines), 20, "the request waits")
    first = next(e for e in fleet.engines if len(e.engine.scheduler.waiting))
    first.kill()
    engine = next(engine for engine in fleet.engines if engine is not first)
    until(lambda: len(engine.engine.scheduler.waiting) == 3, 20, "it was sent again")
    assert {r.group.add.request_id for r in engine.engine.lifecycle.requests} == {"mine"}
    fleet.http.post("/v1/resume")
    choices = asked.reply()["choices"]
    assert [c["token_ids"] for c in choices] == [expected_tokens([1, 2], 5)] * 3
    assert len(choices[0]["prompt_logprobs"]) == 2


def test_requests_wait_for_a_replica_and_go_on_in_their_order(fleet):
    asked = Asked(fleet, prompt=[1, 2], max_tokens=100)
    other = Asked(fleet, prompt=[3, 4], max_tokens=100)
    until(lambda: all(e.engine.scheduler.running for e in fleet.engines), 20, "both run")
    fleet.http.post("/v1/pause", json={"mode": "keep"})
    for engine in fleet.engines:
        engine.kill()
    until(lambda: fleet.client._dispatcher.num_waiting == 2, 20, "both wait")
    fleet.engines[0].start()
    fleet.wait_members(1)
    assert fleet.http.get("/v1/is_paused").json()["result"]["is_paused"], (
        "the hold of the fleet stands on its next engine"
    )
    fleet.http.post("/v1/resume")
    assert asked.reply()["choices"][0]["token_ids"] == expected_tokens([1, 2], 100)
    assert other.reply()["choices"][0]["token_ids"] == expected_tokens([3, 4], 100)


def test_a_new_request_waits_for_the_restart_of_the_only_replica():
    with fake_fleet(1) as fleet:
        engine = fleet.engines[0]
        engine.kill()
        until(lambda: not fleet.client.membership.quorum, 20, "noticed")
        asked = Asked(fleet, prompt=[1, 2], max_tokens=5)
        until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
        assert fleet.http.get("/health").status_code == fleet.http.get("/ready").status_code == 503
        engine.start()
        assert asked.reply()["choices"][0]["token_ids"] == expected_tokens([1, 2], 5)


def test_a_fleet_without_a_member_so_far_refuses_requests():
    config = FleetConfig(fleet_id="fleet-1", rebuild_s=0.2, lease_s=0.2)  # how long a request waits for a member
    gateway = FakeGateway(config, lambda: StaticLauncher([]))
    refused = gateway.http.post("/v1/completions", json=BODY | {"prompt": [1], "max_tokens": 2})
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    gateway.end_gateway()


def test_no_replica_for_too_long_is_an_error_of_the_engine():
    config = FleetConfig(fleet_id="fleet-1", failover_s=0.3)
    with fake_fleet(1, runner={"step_s": SLOW_S}, config=config) as fleet:
        asked = Asked(fleet, prompt=[1, 2], max_tokens=100)
        busy(fleet).kill()
        asked._thread.join(30)
        assert asked._reply.status_code == 503
        assert asked._reply.json()["error"]["code"] == "engine_dead"
        assert fleet.client._relays == {}
        refused = fleet.http.post("/v1/completions", json=BODY | {"prompt": [1], "max_tokens": 2})
        assert refused.status_code == 503 and "is ready" in refused.text, "new requests wait no longer"


def test_a_full_replica_sends_a_request_to_another_one():
    with fake_fleet(2, max_waiting=1) as fleet:
        fleet.http.post("/v1/pause", json={"mode": "keep"})
        # The router counts nothing of what other clients have sent.
        first, second = fleet.client.membership.replicas.values()
        second.load += 10**6
        waiting = [Asked(fleet, prompt=[i, 7], max_tokens=3) for i in range(2)]
        until(lambda: all(len(e.engine.scheduler.waiting) == 1 for e in fleet.engines), 20, "one waits at each")
        refused = fleet.http.post("/v1/completions", json=BODY | {"prompt": [9], "max_tokens": 2})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        fleet.http.post("/v1/resume")
        assert [a.reply()["choices"][0]["token_ids"] for a in waiting] == [expected_tokens([i, 7], 3) for i in range(2)]
