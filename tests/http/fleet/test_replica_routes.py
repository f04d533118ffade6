"""Routes about replicas: of a gateway, and of a server that is its own and only replica."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.server import in_background, until
from fastdeploy.core.process import host_id
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import FakeFleet, fake_fleet
from support.fake_runner import write_adapter

REPORT = {
    "fleet": "", "version": "v7", "weight_epoch": 7, "holds": [{"id": "h"}], "running": 2, "waiting": 1,
    "available_gpu_block_num": 9, "max_num_seqs": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(3) as fleet:
        yield fleet


def replicas(fleet: FakeFleet) -> dict[str, dict]:
    reply = fleet.http.get("/v1/replicas")
    assert reply.status_code == 200
    return {entry["name"]: entry for entry in reply.json()["replicas"]}


def test_the_gateway_lists_each_replica_with_its_state_version_load_and_holds(fleet):
    listed = replicas(fleet)
    assert list(listed) == ["replica-0", "replica-1", "replica-2"]
    for name, entry in listed.items():
        assert (entry["state"], entry["url"], entry["host"]) == ("member", f"http://{name}", host_id())
        assert (entry["version"], entry["weight_epoch"], entry["in_flight"], entry["drains"]) == ("0", 0, 0, False)
        assert entry["load"]["max_num_seqs"] == 4 and entry["holds"] == []


def test_prometheus_finds_the_replicas(fleet):
    targets = fleet.http.get("/v1/replicas/targets").json()
    assert targets[1] == {"targets": ["replica-1"], "labels": {"replica": "replica-1", "__scheme__": "http"}}


def test_a_drained_replica_gets_no_request_until_it_is_undrained(fleet):
    seen = [engine.engine.scheduler.kv.queried_tokens for engine in fleet.engines]
    result = fleet.http.post("/v1/replicas/drain", json={"name": "replica-1"}).json()["result"]
    assert (result["state"], result["in_flight"]) == ("draining", 0)
    for i in range(6):
        body = {"prompt": [i, 9], "max_tokens": 2, "ignore_eos": True}
        assert fleet.http.post("/v1/completions", json=body).status_code == 200
    now = [engine.engine.scheduler.kv.queried_tokens for engine in fleet.engines]
    assert now[1] == seen[1] and sum(now) > sum(seen)
    assert fleet.http.post("/v1/replicas/undrain", json={"name": "replica-1"}).json()["result"]["state"] == "member"


def test_a_drain_that_takes_too_long_is_answered_and_goes_on(fleet):
    body = {"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True}
    fleet.http.post("/v1/pause", json={"mode": "keep"})
    try:
        with fleet.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            busy = until(lambda: [r for r in replicas(fleet).values() if r["in_flight"]], 30, "it is placed")[0]
            call = {"name": busy["name"], "timeout_s": 0.05}
            result = fleet.http.post("/v1/replicas/drain", json=call).json()["result"]
            assert (result["state"], result["in_flight"]) == ("draining", 1)
            fleet.http.post("/v1/resume")
            assert stream.read().rstrip().endswith(b"[DONE]")
        assert fleet.http.post("/v1/replicas/drain", json={"name": busy["name"]}).json()["result"]["in_flight"] == 0
    finally:
        fleet.http.post("/v1/resume")
        fleet.http.post("/v1/replicas/undrain", json={"name": busy["name"]})


@pytest.mark.parametrize("call", ["drain", "undrain", "remove"])
def test_an_unknown_replica_is_named(fleet, call):
    reply = fleet.http.post(f"/v1/replicas/{call}", json={"name": "replica-9"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "replica_not_found"
    assert "replica-9" in reply.json()["error"]["message"]


def test_a_missing_or_unknown_field_is_named(fleet):
    assert fleet.http.post("/v1/replicas/drain", json={}).json()["error"]["param"] == "name"
    reply = fleet.http.post("/v1/replicas/remove", json={"name": "replica-0", "drain": 1})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "drain"


def test_replicas_that_somebody_else_runs_cannot_be_added(fleet):
    reply = fleet.http.post("/v1/replicas/add")
    assert reply.status_code == 400 and "does not start replicas" in reply.json()["error"]["message"]


def test_replicas_that_somebody_else_runs_cannot_be_rolled(fleet):
    error = fleet.http.post("/v1/replicas/roll", json={"settings": {"max-num-seqs": "8"}}).json()["error"]
    assert "replica-0, replica-1, replica-2: started by somebody else" in error["message"]
    assert fleet.http.get("/v1/replicas").json()["roll"] is None


def test_a_removed_replica_is_gone_and_the_others_serve():
    with fake_fleet(2) as fleet:
        assert fleet.http.post("/v1/replicas/remove", json={"name": "replica-0"}).json()["result"]["state"] == "removed"
        assert list(replicas(fleet)) == ["replica-1"]
        body = {"prompt": [1], "max_tokens": 2, "ignore_eos": True}
        assert fleet.http.post("/v1/completions", json=body).status_code == 200


def test_a_server_of_its_own_lists_itself(stack):
    stack.engine.replies[m.FleetStateArgs] = lambda call: m.Reply(call.call_id, REPORT)
    [entry] = stack.http.get("/v1/replicas").json()["replicas"]
    assert (entry["name"], entry["url"], entry["state"]) == ("self", stack.server.url, "member")
    assert (entry["version"], entry["weight_epoch"], entry["in_flight"]) == ("v7", 7, 3)
    assert entry["holds"] == [{"id": "h"}] and entry["load"]["available_gpu_block_num"] == 9
    reply = stack.http.post("/v1/replicas/add")
    assert reply.status_code == 400 and "not the gateway" in reply.json()["error"]["message"]


def test_a_server_whose_engine_is_gone_lists_itself_as_starting(stack):
    stack.engine.die()
    until(lambda: stack.http.get("/health").status_code == 503, 30, "the loss is noticed")
    [entry] = stack.http.get("/v1/replicas").json()["replicas"]
    assert entry["state"] == "starting" and "engine" in entry["why"]


def test_the_metrics_of_a_fleet_are_readable_whatever_the_names_of_its_adapters(fleet, tmp_path):
    path = write_adapter(tmp_path / "a", "a5")
    names = [f'a{line_end}fastdeploy:forged{{x="y"}} 7' for line_end in ("\n", "\r", "\v", "\f", "\x85", "\u2028")]
    for name in names:
        loaded = fleet.http.post("/v1/adapters/load", json={"lora_name": name, "lora_path": path})
        assert loaded.status_code == 200, loaded.text
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    body = {"prompt": [1], "max_tokens": 1, "ignore_eos": True}
    replies = [in_background(fleet.http.post, "/v1/completions", json=body | {"model": name}) for name in names]

    def listed() -> list[str]:
        read = {family.name: family for family in text_string_to_metric_families(fleet.http.get("/metrics").text)}
        assert "fastdeploy:forged" not in read
        return sorted(sample.labels["lora_name"] for sample in read["fastdeploy:adapter_requests"].samples)

    until(lambda: listed() == sorted(names), 20, "every adapter has a request")
    assert fleet.http.post("/v1/resume").status_code == 200
    for name, reply in zip(names, replies, strict=True):
        assert reply.result(20).status_code == 200
        assert fleet.http.post("/v1/adapters/unload", json={"lora_name": name}).status_code == 200
