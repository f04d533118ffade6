"""A fleet whose replicas are on other hosts: their engines are reached by TCP, their files by HTTP only. A replica with
a TCP address counts as one on another host, whatever the address is."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_server import Gateway
from e2e.server import PROMPT, SMALL, Server, halves, until
from fastdeploy.testing.process import free_port
from frameworks.adapters import adapter_folder
from support.tcp_proxy import Proxy

pytestmark = pytest.mark.slow
KEY, OTHER_KEY = "0123456789abcdef" * 4, "fedcba9876543210" * 4
QUICK = ("--stall-s", "2", "--fence-after-s", "2")


class Host:
    """A replica, with proxies before its engine and its API server at ``address``, and an upload folder of its own.
    Replicas with different addresses count as replicas on different hosts."""

    def __init__(self, address: str, folder: Path, key: Path, *flags: str):
        self.uploads = folder
        folder.mkdir()
        self.engine_port = free_port()
        endpoint = f"tcp://127.0.0.1:{self.engine_port}"
        own = ("--fleet-endpoint", endpoint, "--fleet-key-file", str(key), "--upload-dir", str(folder))
        self.server = Server(*SMALL, *own, *flags)
        self._address = address
        self.engine, self.api = Proxy(self.engine_port, address), Proxy(self.server.port, address)

    @property
    def flags(self) -> tuple[str, str]:
        """The flags with which a gateway finds the replica."""
        return "--replica", f"tcp://{self._address}:{self.engine.port}=http://{self._address}:{self.api.port}"

    def close(self) -> None:
        self.engine.close()
        self.api.close()
        self.server.close()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY)
    return path


@pytest.fixture(scope="module")
def hosts(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    folder = tmp_path_factory.mktemp("uploads")
    made = [Host(f"127.0.0.{i + 1}", folder / str(i), key) for i in range(2)]
    try:
        for host in made:
            host.server.wait_ready()
        yield made
    finally:
        for host in made:
            host.close()


@pytest.fixture(scope="module")
def fleet(hosts: list[Host], key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    uploads = tmp_path_factory.mktemp("gateway")
    flags = [flag for host in hosts for flag in host.flags]
    with Gateway(2, *flags, "--fleet-key-file", str(key), "--upload-dir", str(uploads), *QUICK) as gateway:
        gateway.uploads = uploads
        yield gateway


def checksums(servers: list[Any]) -> set[str]:
    return {server.weights(checksums=True)["checksum"] for server in servers}


def assert_nothing_is_left(fleet: Gateway, hosts: list[Host], joined: bool = False) -> None:
    """A file of halves stays at a server that has received weights, for the next upload: at the gateway, and at a
    replica that has ``joined``. The replicas keep nothing of what the gateway sends."""
    until(lambda: max(len(os.listdir(host.uploads)) for host in hosts) <= joined, 20, "no upload is left")
    assert len(os.listdir(fleet.uploads)) <= 1


def test_uploaded_weights_reach_all_hosts(fleet, hosts, new_weights, on_new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    before = [host.api.received for host in hosts]
    result = fleet.request("POST", "/v1/update_weights?version=uploaded", body).result
    assert [entry["status"] for entry in result["replicas"]] == ["done", "done"]
    assert all(len(body) < host.api.received - b < 1.1 * len(body) for host, b in zip(hosts, before, strict=True))
    assert len(checksums([host.server for host in hosts])) == 1
    assert {host.server.weights()["version"] for host in hosts} == {"uploaded"}
    for host in hosts:
        assert host.server.complete(PROMPT, max_tokens=40, ignore_eos=True)["token_ids"] == on_new_weights["token_ids"]
    assert_nothing_is_left(fleet, hosts)


def test_an_upload_reaches_the_last_host_while_the_gateway_still_receives_it(fleet, hosts, new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    half, before = len(body) // 2, hosts[1].api.received

    def halves_in_turn() -> Iterator[bytes]:
        yield body[:half]
        until(lambda: hosts[1].api.received - before > half // 2, 20, "some of it has come")
        yield body[half:]

    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
    with httpx.Client(base_url=fleet.url, timeout=60) as client:
        reply = client.post("/v1/update_weights?version=streamed", content=halves_in_turn(), headers=headers)
    assert [entry["status"] for entry in reply.json()["result"]["replicas"]] == ["done", "done"]
    assert {host.server.weights()["version"] for host in hosts} == {"streamed"}
    assert_nothing_is_left(fleet, hosts)


def test_parts_and_shared_memory_reach_all_hosts(fleet, hosts, new_weights):
    session = fleet.post("/v1/weights/begin", {"version": "halves"}).result["session_id"]
    for part in halves(new_weights):
        assert fleet.request("POST", f"/v1/weights/chunk?session_id={session}", part).status == 200
    assert fleet.post("/v1/weights/commit", {"session_id": session}).result["version"] == "halves"
    expected = checksums([host.server for host in hosts])
    data = (new_weights / "model.safetensors").read_bytes()
    memory = SharedMemory(create=True, size=len(data))
    try:
        memory.buf[: len(data)] = data
        body = {"shared_memory": memory.name, "nbytes": len(data), "version": "shared"}
        assert fleet.post("/v1/update_weights", body).result["version"] == "shared"
    finally:
        memory.close()
        memory.unlink()
    assert checksums([host.server for host in hosts]) == expected and len(expected) == 1
    assert_nothing_is_left(fleet, hosts)


def test_an_uploaded_adapter_reaches_all_hosts(fleet, hosts, tmp_path):
    folder = adapter_folder(tmp_path / "a", 1)
    config = (folder / "adapter_config.json").read_text()
    body = (folder / "adapter_model.safetensors").read_bytes()
    path = httpx.URL("/v1/adapters/load", params={"lora_name": "a", "config": config})
    assert fleet.request("POST", str(path), body).result["lora_name"] == "a"
    answers = [host.server.complete(PROMPT, model="a", max_tokens=20, ignore_eos=True)["token_ids"] for host in hosts]
    assert answers[0] == answers[1]
    assert fleet.post("/v1/adapters/unload", {"lora_name": "a"}).status == 200
    assert_nothing_is_left(fleet, hosts)


def test_the_gateway_passes_an_export_on(fleet, hosts):
    reply = fleet.get("/v1/weights/export")
    assert reply.status == 200 and reply.headers["X-Weight-Fingerprint"] == fleet.weights()["fingerprint"]
    assert reply.body == hosts[0].server.get("/v1/weights/export").body
    assert_nothing_is_left(fleet, hosts)


def test_a_folder_that_other_hosts_lack_is_refused_with_the_reason(fleet):
    reply = fleet.post("/v1/update_weights", {"model_path": "/nowhere"})
    assert reply.json["error"]["code"] == "weight_update_refused"
    assert "the same path on all hosts" in reply.json["error"]["message"]


def test_a_replica_that_restarts_gets_the_weights_from_a_peer(fleet, hosts, new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    fleet.request("POST", "/v1/update_weights?version=peer", body).ok()
    os.kill(hosts[0].server.engine_pid, signal.SIGKILL)
    until(lambda: fleet.replicas()["replica-0"]["state"] != "member", 20, "the loss is noticed")
    fleet.wait_members(2)
    assert len(checksums([host.server for host in hosts])) == 1
    assert hosts[0].server.weights()["version"] == "peer"
    assert_nothing_is_left(fleet, hosts, joined=True)


def test_a_replica_that_restarts_gets_adapters_and_eos_ids_though_the_trainer_has_overwritten_its_folders(
    fleet, hosts, new_weights, tmp_path
):
    uploaded, folder = adapter_folder(tmp_path / "u", 3), adapter_folder(tmp_path / "f", 4)
    query = {"lora_name": "uploaded", "config": (uploaded / "adapter_config.json").read_text()}
    path = str(httpx.URL("/v1/adapters/load", params=query))
    fleet.request("POST", path, (uploaded / "adapter_model.safetensors").read_bytes()).ok()
    fleet.post("/v1/adapters/load", {"lora_name": "folder", "lora_path": str(folder), "version": "pi-7"}).ok()
    weights = shutil.copytree(new_weights, tmp_path / "w")
    eos = hosts[1].server.complete(PROMPT, model="uploaded", max_tokens=9, ignore_eos=True)["token_ids"][-1]
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    fleet.post("/v1/update_weights", {"model_path": str(weights), "version": "eos"}).ok()
    for written in (folder, weights):
        shutil.rmtree(written)
    adapter_folder(folder, 5)
    names = ("uploaded", "folder", hosts[0].server.get("/v1/models").json["data"][0]["id"])

    def answers_of(host: Host) -> list[Any]:
        return [host.server.complete(PROMPT, model=name, max_tokens=40) for name in names]

    def shown(host: Host) -> list[Any]:
        return [(answer["token_ids"], answer["finish_reason"]) for answer in answers_of(host)]

    before = shown(hosts[0])
    assert before == shown(hosts[1]) and before[0][1] == "stop"
    received, answered = hosts[0].api.received, hosts[1].api.answered
    os.kill(hosts[0].server.engine_pid, signal.SIGKILL)
    until(lambda: fleet.replicas()["replica-0"]["state"] != "member", 20, "the loss is noticed")
    fleet.wait_members(2)
    assert shown(hosts[0]) == before
    files = [new_weights / "model.safetensors", *[uploaded / "adapter_model.safetensors"] * 2]
    size = sum(file.stat().st_size for file in files)
    assert 0.99 * size < hosts[0].api.received - received < 1.05 * size
    assert hosts[1].api.answered - answered < 0.1 * size, "the bytes go from host to host"
    fingerprints = [[a["fingerprint"] for a in host.server.get("/v1/adapters").result["adapters"]] for host in hosts]
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints[0])) == 2
    exported = fleet.get("/v1/adapters/export?lora_name=uploaded")
    assert exported.body == (uploaded / "adapter_model.safetensors").read_bytes()
    assert exported.headers["X-Adapter-Fingerprint"] in fingerprints[0]
    assert fleet.get("/v1/weights/export").headers["X-Weight-EOS-Token-Ids"] == str(eos)
    for name in ("uploaded", "folder"):
        fleet.post("/v1/adapters/unload", {"lora_name": name}).ok()
    assert_nothing_is_left(fleet, hosts, joined=True)


@pytest.mark.parametrize("how", ["cut", "stalled"])
def test_a_replica_behind_a_broken_network_is_fenced_and_comes_back(fleet, hosts, how):
    hosts[1].engine.flows.clear()
    hosts[1].api.flows.clear()
    if how == "cut":
        hosts[1].engine.cut()
    try:
        until(lambda: fleet.replicas()["replica-1"]["state"] == "fenced", 30, "it is fenced")
        result = fleet.post("/v1/pause", {"mode": "keep", "hold_id": how}).result
        assert result["is_paused"]
    finally:
        hosts[1].engine.flows.set()
        hosts[1].api.flows.set()
    fleet.wait_members(2)
    assert [hold["id"] for hold in hosts[1].server.get("/v1/is_paused").result["holds"]] == [how]
    assert fleet.post("/v1/resume", {"hold_id": how}).result["released"] == [how]


def test_a_network_that_breaks_in_an_upload_fences_that_replica_only(fleet, hosts, new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    hosts[1].api.flows.clear()
    try:
        result = fleet.request("POST", "/v1/update_weights?version=one", body).result
    finally:
        hosts[1].api.flows.set()
    assert result["version"] == "one"
    fleet.wait_members(2)
    assert {host.server.weights()["version"] for host in hosts} == {"one"}
    assert_nothing_is_left(fleet, hosts, joined=True)


def test_a_call_to_a_replica_itself_is_refused_and_names_the_gateway(fleet, hosts):
    reply = hosts[0].server.post("/v1/pause", {"mode": "keep"})
    assert (reply.status, reply.json["error"]["code"]) == (409, "not_leader")
    assert "make the call at the fleet's gateway" in reply.json["error"]["message"]


def test_a_wrong_key_and_an_address_where_nobody_listens_are_shown(hosts, tmp_path):
    other = tmp_path / "key"
    other.write_text(OTHER_KEY)
    nobody = f"tcp://127.0.0.1:{free_port()}=http://127.0.0.1:{free_port()}"
    gateway = Gateway(0, *hosts[0].flags, "--replica", nobody, "--fleet-key-file", str(other))
    try:
        until(lambda: answers(gateway) and named(gateway), 60, "reasons are shown")
        assert {replica["state"] for replica in gateway.replicas().values()} == {"starting"}
        assert gateway.get("/ready").status == 503
    finally:
        gateway.close()


def named(gateway: Gateway) -> bool:
    """Return whether the key is named as the reason of the first replica, and the network as that of the second."""
    refused, unreachable = gateway.replicas().values()
    return "refused the fleet key" in refused["why"] and "cannot be reached" in unreachable["why"]


def answers(gateway: Gateway) -> bool:
    try:
        return gateway.get("/v1/replicas").status == 200
    except httpx.TransportError:  # not bound yet
        return False
