"""Faults that need real processes and weights: deaths, and syncs that go wrong without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_server import FleetServer
from e2e.server import PROMPT, SMALL, Server, halves, perturbed, until
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.faults.rules import read_rule
from fastdeploy.faults.tensors import chosen, parse

pytestmark = pytest.mark.processes
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError)
COUNT = 24
BODY = {"prompt": PROMPT, "max_tokens": COUNT, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


SCENARIO = {"seed": 11, "rules": [{"fault": "version_wrong", "times": 0, "probability": 0.5, "path": "/generate"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """Return a server that plays a scenario. Tests of deaths come first: an engine that dies after an update of its
    weights waits for them to be published again."""
    path = tmp_path_factory.mktemp("faults") / "scenario.json"
    path.write_text(json.dumps(SCENARIO))
    with Server(*SMALL, "--faults", str(path)) as server:
        yield server


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    return perturbed(tmp_path_factory.mktemp("weights") / "policy-1")


def call(server: Server, path: str, fault: str = "", body: Any = None) -> httpx.Response:
    """Make a POST call with a fault."""
    how = {"content": body, "headers": {"content-type": "application/octet-stream"}}
    how = how if isinstance(body, bytes) else {"json": body, "headers": {}}
    if fault:
        how["headers"]["X-Fault"] = fault
    return server.http.post(path, **how)


def update(server: Server, folder: Path | str, version: str, fault: str = "", **fields: Any) -> httpx.Response:
    return call(server, "/v1/update_weights", fault, {"model_path": str(folder), "version": version, **fields})


def served(server: Server) -> dict[str, Any]:
    return parse(server.http.get("/v1/weights/export").content)


def counts(server: Server) -> dict[str, int]:
    return server.get("/v1/faults").result["counts"]


def wait_ready(server: Server) -> None:
    def ready() -> bool:
        try:
            return server.get("/ready").status == 200
        except httpx.TransportError:
            return False

    until(ready, 60, "ready")


def tokens(server: Server, fault: str = "", **fields: Any) -> Any:
    """Return the answer to a completion of COUNT tokens."""
    return call(server, "/v1/completions", fault, BODY | fields)


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


# ---------------------------------------------------------------------- deaths


def labels(server: Server, count: int) -> list[str]:
    """Return the labels of so many requests that the scenario is for."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    return [server.post("/generate", body).ok()["meta_info"]["weight_version"] for _ in range(count)]


def test_the_engine_dies_with_so_many_tokens_at_the_client(server):
    whole = ids(tokens(server))
    boot = server.get("/health").json["boot_id"]
    reply = tokens(server, "death; tokens=5")
    body = reply.json()
    assert (reply.status_code, body["error"]["code"], reply.headers["x-fault-injected"]) == (
        503,
        "engine_dead",
        "death",
    )
    assert [choice["token_ids"] for choice in body["choices"]] == [whole[:5]]
    wait_ready(server)
    assert server.get("/health").json["boot_id"] != boot
    assert ids(tokens(server)) == whole


def test_an_api_server_dies_and_the_next_one_goes_on_with_the_scenario(server):
    whole, begun = ids(tokens(server)), labels(server, 8)
    [pid] = server.api_pids
    before = server.get("/v1/faults").result
    headers, body = {"X-Fault": "death; of=api_server; tokens=3"}, BODY | {"stream": True}
    events = []
    with pytest.raises(BROKEN), server.http.stream("POST", "/v1/completions", headers=headers, json=body) as reply:
        assert (reply.status_code, reply.headers["x-fault-injected"]) == (200, "death")
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:])["choices"][0]["token_ids"])
    assert [token for event in events for token in event] == whole[:3]
    wait_ready(server)
    assert server.api_pids != [pid]
    after = server.get("/v1/faults").result
    assert after["counts"]["death"] == before["counts"].get("death", 0) + 1
    assert after["armed"][0]["matched"] == 8
    rule = read_rule({**SCENARIO["rules"][0], "seed": 11, "name": "rule-1"}, is_fleet=False)
    assert [label == "wrong" for label in begun + labels(server, 8)] == [rule.draw() for _ in range(16)]
    assert after["happened"][-1]["acted"]
    assert server.metric('faults_injected_total{fault="death"}') == after["counts"]["death"]


def test_a_death_after_a_pause_loses_its_answer_but_not_the_pause(server):
    with pytest.raises(BROKEN):
        call(server, "/v1/pause", "death_in_call; of=api_server; when=after", {"mode": "keep", "hold_id": "trainer"})
    wait_ready(server)
    assert server.get("/v1/is_paused").result["is_paused"]
    server.post("/v1/resume", {"hold_id": "trainer"}).ok()


def test_a_frozen_engine_goes_on(server):
    whole = ids(tokens(server))
    reply = tokens(server, "frozen; tokens=3; seconds=0.3")
    assert ids(reply) == whole and reply.headers["x-fault-injected"] == "frozen"
    assert ids(tokens(server, "frozen; of=server; tokens=3; seconds=0.3")) == whole


def test_clocks_jump_and_come_back(server):
    def created(fault: str = "") -> int:
        return tokens(server, fault, max_tokens=1).json()["created"]

    now = created()
    assert created("clock_jump; of=api_server; seconds=-100000") < now - 90000
    assert created() < now - 90000
    created("clock_jump; of=engine; seconds=500000")
    server.http.delete("/v1/faults")
    assert now <= created() < now + 1000
    ids(tokens(server, deadline_s=30))


# ---------------------------------------------------------------------- weights

# The fault, and which tensors are then not as they were sent. Stale ones are as they were before.
MLP = "*.mlp.*"
WRONG = [
    ("chunk_dropped", "*"),
    ("chunk_doubled", ""),
    ("bits_flipped", "*"),
    (f"tensors_stale; tensors={MLP}", MLP),
    (f"tensors_transposed; tensors={MLP}", MLP),
    (f"tensors_scaled; tensors={MLP}; factor=3", MLP),
]


@pytest.mark.parametrize("how", ["folder", "chunks"])
@pytest.mark.parametrize(("fault", "pattern"), WRONG, ids=[row[0] for row in WRONG])
def test_a_sync_goes_wrong_in_exactly_the_tensors_of_the_fault(server, new, fault, pattern, how):
    update(server, MODEL_DIR, "base").raise_for_status()
    before, sent = served(server), parse((new / "model.safetensors").read_bytes())
    name = fault.partition(";")[0]
    counted = counts(server).get(name, 0)
    reply = update(server, new, "new", fault) if how == "folder" else in_chunks(server, new, fault)
    after, epoch = served(server), server.weights()["weight_epoch"]
    assert reply.headers["x-fault-injected"] == name and counts(server)[name] == counted + 1
    if (name, how) == ("chunk_doubled", "chunks"):  # the engine refuses the second one, and the session ends
        assert (reply.status_code, after) == (400, before)
    else:
        assert (reply.status_code, server.weights()["version"]) == (200, "new")
        given = sent if how == "folder" else parse(halves(new)[0])
        wrong = set(chosen(given, pattern))
        assert differing(after, sent) == wrong
        if name in ("chunk_dropped", "tensors_stale"):
            assert not differing(after, before) & wrong
    update(server, new, "good").raise_for_status()
    assert not differing(served(server), sent)
    assert name != "chunk_doubled" or how == "chunks" or reply.json()["result"]["weight_epoch"] == epoch


@pytest.mark.parametrize("how", ["folder", "chunks"])
def test_a_sync_that_fails_half_way_leaves_weights_partly_advanced_under_the_old_version(server, new, how):
    update(server, MODEL_DIR, "base").raise_for_status()
    before, sent = served(server), parse((new / "model.safetensors").read_bytes())
    fault = "sync_fails_half_way"
    reply = update(server, new, "new", fault) if how == "folder" else in_chunks(server, new, fault)
    assert (reply.status_code, reply.headers["x-fault-injected"]) == (500, fault)
    given = list(sent) if how == "folder" else list(parse(halves(new)[0]))
    advanced = set(given[: (len(given) + 1) // 2])
    after = served(server)
    assert differing(after, before) == advanced and differing(after, sent) == set(sent) - advanced
    assert server.weights()["version"] == "base" and server.weights()["session"] is None
    update(server, new, "good").raise_for_status()
    assert not differing(served(server), sent)


def in_chunks(server: Server, folder: Path, fault: str) -> httpx.Response:
    """Make an update of two chunks, the first of them with the fault; return the reply to this chunk."""
    first, second = halves(folder)
    session = server.post("/v1/weights/begin", {"version": "new"}).result["session_id"]
    path = f"/v1/weights/chunk?session_id={session}"
    reply = call(server, path, fault, first)
    if reply.status_code == 200:
        call(server, path, "", second).raise_for_status()
        server.post("/v1/weights/commit", {"session_id": session}).ok()
    return reply


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the names of the tensors that are not the same."""
    return {name for name in one if one[name] != other[name]}


def test_a_checksum_of_the_trainer_finds_a_flipped_bit(server, new):
    update(server, MODEL_DIR, "base").raise_for_status()
    fingerprint = update(server, new, "new").json()["result"]["fingerprint"]
    update(server, MODEL_DIR, "base").raise_for_status()
    reply = update(server, new, "new", "bits_flipped", fingerprint=fingerprint)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "weight_update_refused")
    assert server.weights()["version"] == "base"


def test_kept_kv_is_found_under_the_new_weights_and_forgotten_by_the_next_update(server, new):
    update(server, MODEL_DIR, "base").raise_for_status()
    old = ids(tokens(server))
    update(server, new, "new", "kv_kept").raise_for_status()
    stale = tokens(server).json()
    assert stale["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    update(server, new, "new again").raise_for_status()
    sound = tokens(server).json()
    assert sound["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert stale["choices"][0]["token_ids"] != sound["choices"][0]["token_ids"] != old


def test_a_rule_waits_for_the_version_that_an_update_brings(server, new):
    server.post("/v1/faults", {"fault": "chunk_dropped", "version": "3"}).ok()
    injected = [update(server, new, str(step)).headers.get("x-fault-injected") for step in range(1, 5)]
    server.http.delete("/v1/faults")
    assert injected == [None, None, "chunk_dropped", None]


# ---------------------------------------------------------------------- a fleet


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetServer]:
    with FleetServer(2, *SMALL, "--faults") as fleet:
        yield fleet


@pytest.mark.slow
def test_a_request_survives_the_death_of_its_replica(fleet):
    def replicas() -> set[int]:
        return set(fleet.pids("fastdeploy.entrypoints.replica_main"))

    whole, before = ids(tokens(fleet)), replicas()
    reply = tokens(fleet, "death; of=replica; tokens=4")
    assert ids(reply) == whole and reply.headers["x-fault-injected"] == "death"
    until(lambda: len(replicas()) == 2 and len(replicas() & before) == 1, 60, "another replica in place of one")
    fleet.wait_members(2)


@pytest.mark.slow
def test_a_gateway_dies_and_the_next_one_knows_what_happened(fleet):
    pid, before = fleet.gateway_pid, counts(fleet).get("death", 0)
    with pytest.raises(BROKEN):
        tokens(fleet, "death; of=gateway; tokens=4")
    wait_ready(fleet)
    fleet.wait_members(2)
    assert fleet.gateway_pid != pid
    assert counts(fleet)["death"] == before + 1


@pytest.mark.slow
def test_faults_of_tokens_and_weights_are_those_of_a_fleet_too(fleet, new):
    with pytest.raises(BROKEN):
        tokens(fleet, "stream_cut; tokens=3")
    reply = update(fleet, new, "new", f"tensors_scaled; tensors={MLP}")
    assert (reply.status_code, reply.headers["x-fault-injected"]) == (200, "tensors_scaled")
    sent = parse((new / "model.safetensors").read_bytes())
    assert differing(served(fleet), sent) == set(chosen(sent, MLP))
    assert call(fleet, "/v1/faults", "", {"fault": "death", "of": "api_server"}).json()["error"]["param"] == "of"


def test_a_server_without_the_flag_imports_nothing_of_faults():
    code = (
        "import sys; from fastdeploy.entrypoints import engine_main, gateway, supervisor\n"
        "from fastdeploy.entrypoints.api_server import faults_of; from fastdeploy.core.config import ServeConfig\n"
        "assert faults_of(ServeConfig(model='m'), None) is None\n"
        "sys.exit(any(name.startswith('fastdeploy.faults') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
