"""A fleet of two engines on one host: clients see one server, whichever process dies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from e2e.fleet_server import FleetServer, Gateway
from e2e.server import PROMPT, SMALL, LiveStream, Server, until
from fastdeploy.core.errors import NotLeader
from fastdeploy.core.process import is_alive
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.testing.process import free_port
from rl.embedded_weights import embedded_weights

NAMES = ["replica-0", "replica-1"]
LONG = 800  # tokens of a stream that runs while a process is killed


@pytest.fixture(scope="module")
def shared() -> Iterator[FleetServer]:
    with FleetServer(2, *SMALL) as fleet:
        yield fleet
        assert fleet.stop() == 0, fleet.log()
        assert fleet.leftovers() == []


@pytest.fixture
def fleet(shared: FleetServer) -> Iterator[FleetServer]:
    """Return the shared fleet. It runs again with two members after the test."""
    yield shared
    shared.wait_ready()
    shared.post("/v1/resume")


@pytest.fixture(scope="module")
def undisturbed(shared: FleetServer) -> Callable[[int], list[int]]:
    """Return ``undisturbed(i)``: the tokens of stream ``i`` when nothing happens to the fleet."""
    known: dict[int, list[int]] = {}

    def tokens(i: int) -> list[int]:
        if i not in known:
            known[i] = shared.complete(prompt(i), max_tokens=LONG, ignore_eos=True)["token_ids"]
        return known[i]

    return tokens


def prompt(i: int) -> list[int]:
    """Return a prompt whose beginning no other prompt has, so that no replica is the better one for it."""
    return [60 + i, *PROMPT]


def start_streams(fleet: FleetServer, num: int, tokens: int = LONG) -> list[LiveStream]:
    """Start streams, and return when all of them run, on both replicas."""
    fleet.post("/v1/pause", {"mode": "keep", "hold_id": "start"}).ok()
    streams = [LiveStream(fleet, prompt(i), max_tokens=tokens) for i in range(num)]
    until(lambda: sum(r["in_flight"] for r in fleet.replicas().values()) == num, 20, "all requests are placed")
    assert all(r["in_flight"] for r in fleet.replicas().values()), "the requests are not spread"
    fleet.post("/v1/resume", {"hold_id": "start"}).ok()
    return [one.wait_for_tokens(1) for one in streams]


def kill_gateway(fleet: FleetServer) -> None:
    pid = fleet.gateway_pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), 20, "the gateway is gone")


def assert_whole(streams: list[LiveStream], undisturbed: Callable[[int], list[int]]) -> None:
    """Every stream ends once, without an error, with the tokens of an undisturbed run."""
    for i, one in enumerate(streams):
        one.wait_end(90)
        assert (one.error, one.finals, one.done_seen) == (None, ["length"], True)
        assert one.tokens == undisturbed(i)


def test_an_openai_client_uses_the_fleet_as_one_server(fleet):
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none")
    [model] = client.models.list().data
    chunks = client.completions.create(model=model.id, prompt="1 2 3", max_tokens=8, stream=True, temperature=0)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert (
        text == client.completions.create(model=model.id, prompt="1 2 3", max_tokens=8, temperature=0).choices[0].text
    )
    replicas = fleet.replicas()
    assert list(replicas) == NAMES and {r["state"] for r in replicas.values()} == {"member"}
    assert len({r["url"] for r in replicas.values()}) == 2 and len({r["host"] for r in replicas.values()}) == 1


def test_a_pause_stops_every_replica_and_a_resume_starts_every_one(fleet):
    streams = start_streams(fleet, 2)
    assert fleet.post("/v1/pause", {"mode": "keep"}).result["is_paused"]
    assert all(fleet.ask(name, "/v1/is_paused")["is_paused"] for name in NAMES)
    assert fleet.post("/v1/resume").result["still_held_by"] == []
    assert not any(fleet.ask(name, "/v1/is_paused")["is_paused"] for name in NAMES)
    assert [one.wait_end().finals for one in streams] == [["length"]] * 2


def test_streams_of_an_engine_that_is_killed_go_on_elsewhere(fleet, undisturbed):
    streams = start_streams(fleet, 2)
    engine = fleet.engine_of("replica-0")
    assert engine
    os.kill(engine, signal.SIGKILL)
    assert_whole(streams, undisturbed)


def test_a_hold_outlives_the_gateway(fleet):
    old = fleet.gateway_pid
    assert fleet.post("/v1/pause", {"mode": "keep", "hold_id": "trainer"}).result["is_paused"]
    os.kill(old, signal.SIGKILL)
    assert_held(fleet, old)


@pytest.mark.slow
def test_a_gateway_that_is_stopped_is_replaced_and_the_hold_outlives_it():
    with FleetServer(2, *SMALL, "--stall-s", "2") as fleet:
        old = fleet.gateway_pid
        assert fleet.post("/v1/pause", {"mode": "keep", "hold_id": "trainer"}).result["is_paused"]
        os.kill(old, signal.SIGSTOP)
        until(lambda: not is_alive(old), 60, "the stopped gateway is killed")
        assert_held(fleet, old)
        assert "killing gateway-0: its process was silent for 6 s" in fleet.log()


def assert_held(fleet: FleetServer, old: int) -> None:
    """Another gateway than the process ``old`` leads two members, and can release the hold "trainer", which stands."""
    # The parent keeps the listening socket, so this connection waits for the new gateway.
    until(lambda: fleet.get("/health").status == 200, 30, "a new gateway")
    fleet.wait_members(2)
    assert fleet.gateway_pid != old
    status = fleet.get("/v1/is_paused").result
    assert status["is_paused"] and [hold["id"] for hold in status["holds"]] == ["trainer"]
    assert fleet.post("/v1/resume", {"hold_id": "trainer"}).result["released"] == ["trainer"]
    assert not any(fleet.ask(name, "/v1/is_paused")["is_paused"] for name in NAMES)
    assert len(fleet.complete(PROMPT, max_tokens=5, ignore_eos=True)["token_ids"]) == 5


async def test_control_calls_at_a_replica_are_refused_and_name_the_gateway(fleet):
    async with RolloutClient(fleet.replicas()["replica-0"]["url"]) as client:
        assert len((await client.generate(PROMPT, {"max_tokens": 5, "ignore_eos": True})).token_ids) == 5
        for call in (client.pause, client.abort_all, lambda: client.update_weights("/no/such/folder")):
            with pytest.raises(NotLeader, match="make the call at the fleet's gateway"):
                await call()
    assert not fleet.get("/v1/is_paused").result["is_paused"]


def published(seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of a trainer, with noise."""
    rng = np.random.default_rng(seed)
    return {n: v + rng.normal(0, 0.02, v.shape).astype(np.float32) for n, v in embedded_weights().items()}


def assert_serve(fleet: FleetServer, state: dict[str, np.ndarray]) -> None:
    """Check every bit that the replicas serve against the state, rounded to the serving dtype."""
    sums = {name: hashlib.sha256(in_dtype(value, "bfloat16").tobytes()).hexdigest() for name, value in state.items()}
    for name in NAMES:
        assert fleet.ask(name, "/v1/weights?checksums=true")["checksums"] == sums


@pytest.mark.slow
def test_a_state_that_is_published_through_the_gateway_is_on_every_replica(tmp_path):
    with FleetServer(2, *SMALL, "--upload-dir", str(tmp_path)) as fleet, SyncRolloutClient(fleet.url) as client:
        for number, via in enumerate(("upload", "shared_memory", "upload", "shared_memory"), 1):
            shared_before = set(os.listdir("/dev/shm"))
            state = published(number)
            done = client.publish(state, version=via, via=via, chunk_mb=number % 2, delta="never")
            assert (done.number, done.version) == (number, via)
            assert_serve(fleet, state)
            assert {(r["weight_epoch"], r["version"]) for r in fleet.replicas().values()} == {(number, via)}
            assert set(os.listdir("/dev/shm")) <= shared_before
            assert len(list(tmp_path.iterdir())) <= 1, "the gateway keeps one file for the next upload"
        assert fleet.stop() == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_replica_that_is_killed_within_an_upload_comes_back_with_the_uploaded_weights(tmp_path):
    state = published(9)
    with FleetServer(2, *SMALL, "--upload-dir", str(tmp_path)) as fleet, SyncRolloutClient(fleet.url) as client:

        def parts() -> Iterator[tuple[str, np.ndarray]]:
            for i, item in enumerate(state.items()):
                if i == len(state) // 2:
                    os.kill(fleet.replica_pid("replica-0"), signal.SIGKILL)
                    until(lambda: fleet.replicas()["replica-0"]["state"] != "member", 20, "the loss is noticed")
                yield item

        done = client.publish(parts(), version="new", via="upload", chunk_mb=1)
        assert done.version == "new"
        replicas = fleet.wait_members(2)
        assert {r["version"] for r in replicas.values()} == {"new"}
        assert_serve(fleet, state)
        assert fleet.stop() == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_streams_of_a_replica_that_is_killed_or_stopped_go_on_elsewhere(how, undisturbed):
    """A stopped replica is fenced, and killed as a whole. So a new one can take its place."""
    with FleetServer(2, *SMALL, "--stall-s", "2", "--fence-after-s", "2") as fleet:
        streams = start_streams(fleet, 2)
        replica, engine = fleet.replica_pid("replica-1"), fleet.engine_of("replica-1")
        os.killpg(replica, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        assert_whole(streams, undisturbed)
        until(lambda: not is_alive(replica) and not is_alive(engine), 20, "the old processes are gone")
        until(lambda: fleet.engine_of("replica-1") not in (None, engine), 20, "there is a new engine")
        fleet.wait_members(2)


@pytest.mark.slow
def test_a_replica_of_which_only_the_api_server_runs_on_is_replaced(undisturbed):
    with FleetServer(2, *SMALL, "--stall-s", "2", "--fence-after-s", "2") as fleet:
        streams = start_streams(fleet, 2)
        replica, engine = fleet.replica_pid("replica-1"), fleet.engine_of("replica-1")
        assert engine
        for pid in (replica, engine):
            os.kill(pid, signal.SIGSTOP)
        assert_whole(streams, undisturbed)
        until(lambda: not is_alive(replica) and not is_alive(engine), 20, "the old processes are gone")
        until(lambda: fleet.engine_of("replica-1") not in (None, engine), 20, "there is a new engine")
        fleet.wait_members(2)


@pytest.mark.slow
def test_requests_and_a_hold_outlive_three_gateways(fleet, undisturbed):
    """Each gateway is killed while retained streams run, and control calls are made at once."""
    names = [uuid.uuid4().hex for _ in range(2)]

    def attach() -> list[LiveStream]:
        return [
            LiveStream(fleet, prompt(i), max_tokens=LONG, request_id=name, retain_s=60) for i, name in enumerate(names)
        ]

    streams = attach()
    for i in range(3):
        for one in streams:
            one.wait_for_tokens(1)
        hold = {"hold_id": f"trainer-{i}"}
        assert fleet.post("/v1/pause", {"mode": "keep", **hold}).result["is_paused"]
        kill_gateway(fleet)
        for one in streams:
            one.wait_end(20)
        assert fleet.post("/v1/resume", hold).result["released"] == [hold["hold_id"]]
        streams = attach()
    assert_whole(streams, undisturbed)
    fleet.wait_members(2)
    assert fleet.get("/v1/is_paused").result["holds"] == []


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_with_the_weights_of_the_fleet(new_weights, on_new_weights):
    with FleetServer(2, *SMALL) as fleet:
        result = fleet.post("/v1/update_weights", {"model_path": str(new_weights), "version": "policy-1"}).result
        assert result["version"] == "policy-1"
        os.kill(fleet.replica_pid("replica-0"), signal.SIGKILL)
        until(lambda: fleet.replicas()["replica-0"]["state"] != "member", 20, "the loss is noticed")
        replicas = fleet.wait_members(2)
        assert {r["version"] for r in replicas.values()} == {"policy-1"}
        assert {r["weight_epoch"] for r in replicas.values()} == {result["weight_epoch"]}
        assert len({fleet.ask(name, "/v1/weights")["fingerprint"] for name in NAMES}) == 1
        fleet.post("/v1/replicas/drain", {"name": "replica-1"}).ok()  # so the one that came back answers
        assert fleet.complete(PROMPT, max_tokens=40, ignore_eos=True)["token_ids"] == on_new_weights["token_ids"]


@pytest.mark.slow
def test_replicas_are_added_and_removed_under_load(fleet, undisturbed):
    streams = start_streams(fleet, 2)
    name = fleet.post("/v1/replicas/add").result["name"]
    assert name not in NAMES
    until(lambda: fleet.replicas().get(name, {}).get("state") == "member", 60, "the new replica is a member")
    pid = fleet.replica_pid(name)
    assert fleet.post("/v1/replicas/remove", {"name": name}).result["state"] == "removed"
    until(lambda: not is_alive(pid), 30, "its process has ended")
    assert list(fleet.replicas()) == NAMES
    assert_whole(streams, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_everything_and_leaves_nothing(how):
    shared_before = set(os.listdir("/dev/shm"))
    with FleetServer(2, *SMALL) as fleet:
        streams = start_streams(fleet, 2, tokens=3900)
        pids = fleet.pids("fastdeploy.entrypoints")
        assert len(pids) == 2 + 2 * 3, "the parent, a gateway, and an engine and an API server for each replica"
        assert fleet.stop(how, timeout_s=20) == 0, fleet.log()
        for one in streams:
            one.wait_end(30)
            assert one.finals == ["abort"] and one.done_seen, (one.finals, one.error)
        assert not [pid for pid in pids if is_alive(pid)]
        assert fleet.leftovers() == []
    assert set(os.listdir("/dev/shm")) <= shared_before


@pytest.mark.slow
def test_a_killed_parent_ends_everything():
    with FleetServer(2, *SMALL) as fleet:
        pids = fleet.pids("fastdeploy.entrypoints")
        fleet.send_signal(signal.SIGKILL)
        until(lambda: not [pid for pid in pids if is_alive(pid)], 20, "all processes are gone")
        until(lambda: fleet.leftovers() == [], 30, "the socket folder is gone")


@pytest.mark.slow
def test_one_command_makes_one_address_of_plain_servers_and_leaves_them_alone_when_it_ends(tmp_path):
    """A trainer with several URLs, in docs/run-a-fleet.md."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    fleet_key = ("--fleet-key-file", str(key))
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as started:
        servers = [started.enter_context(Server(*SMALL, "--fleet-endpoint", e, *fleet_key)) for e in endpoints]
        flags = [f"--replica={endpoint}={server.url}" for endpoint, server in zip(endpoints, servers, strict=True)]
        with Gateway(2, *flags, *fleet_key) as fleet, SyncRolloutClient(fleet.url) as client:
            entries = list(fleet.replicas().values())
            assert [(e["url"], e["state"]) for e in entries] == [(server.url, "member") for server in servers]
            params = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.0}
            tokens = client.generate(PROMPT, params).token_ids
            for server in servers:
                assert tokens == server.complete(PROMPT, max_tokens=10, ignore_eos=True)["token_ids"]
            with client.paused("keep") as report:
                assert [entry["status"] for entry in report["replicas"]] == ["done"] * 2
                assert all(server.get("/v1/is_paused").result["is_paused"] for server in servers)
                assert client.publish(published(1), version="step-1").version == "step-1"
            assert [server.weights()["version"] for server in servers] == ["step-1"] * 2
            assert fleet.stop() == 0
        assert all(server.get("/ready").status == 200 for server in servers)


@pytest.mark.slow
def test_keys_guard_the_gateway_and_the_replicas(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("secret-of-operators")
    with FleetServerWithKey(key) as fleet:
        for url in (fleet.url, *(r["url"] for r in fleet.replicas().values())):
            reply: Any = fleet.http.post(f"{url}/v1/pause", headers={"Authorization": "Bearer wrong"})
            assert reply.status_code == 401
        assert fleet.post("/v1/pause", {"mode": "keep"}).result["is_paused"]
        for pid in [fleet.pid, *fleet.pids("fastdeploy")]:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key.read_bytes() not in command


class FleetServerWithKey(FleetServer):
    """A fleet with a control key, which all calls show."""

    def __init__(self, key: Path):
        super().__init__(2, *SMALL, "--control-key", str(key), key=key.read_text())
        self.http.headers["Authorization"] = f"Bearer {key.read_text()}"
