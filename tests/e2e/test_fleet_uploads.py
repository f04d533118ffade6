"""Uploads at a gateway that follows. Each of the two gateways, which are real processes, has an upload folder that no
other process sees, as on a host of its own: a mount of a namespace of its own. This needs root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.fleet_server import Gateway
from e2e.server import PROMPT, halves, until
from e2e.test_fleet_hosts import KEY, QUICK, Host, checksums
from fastdeploy.testing.process import free_port
from frameworks.adapters import adapter_folder

MOUNTS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
MAY_MOUNT = subprocess.run([*MOUNTS, "/mnt", "true"], capture_output=True, check=False).returncode == 0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MAY_MOUNT, reason="root may mount here only")]
BYTES = {"Content-Type": "application/octet-stream"}


class HostGateway(Gateway):
    """A gateway whose files in ``folder`` nobody else sees."""

    def __init__(self, folder: Path, hosts: list[Host], key: Path):
        folder.mkdir()
        self.before = (*MOUNTS, str(folder))
        own = ("--upload-dir", str(folder), "--gateway-endpoint", f"tcp://127.0.0.1:{free_port()}")
        replicas = [flag for host in hosts for flag in host.flags]
        super().__init__(len(hosts), *replicas, *own, "--fleet-key-file", str(key), *QUICK)

    def files(self) -> list[str]:
        return os.listdir(f"/proc/{self.gateway_pid}/root{self.before[-1]}")


class Fleet:
    """Two replicas and two gateways. leader: the gateway that leads at first."""

    def __init__(self, folder: Path):
        key = folder / "key"
        key.write_text(KEY)
        self.hosts = [Host(f"127.0.0.{i + 1}", folder / f"uploads-{i}", key) for i in range(2)]
        for host in self.hosts:
            host.server.wait_ready()
        self.leader = HostGateway(folder / "leader", self.hosts, key)
        self.leader.wait_ready()
        self.follower = HostGateway(folder / "follower", self.hosts, key)
        self.follower.wait_ready()

    def versions(self) -> set[str]:
        return {host.server.weights()["version"] for host in self.hosts}

    def wait_no_file(self) -> None:
        """Wait until nothing is left but the file that a gateway keeps for its next upload."""
        until(lambda: not any(os.listdir(host.uploads) for host in self.hosts), 20, "no upload is left")
        assert len(self.follower.files()) <= 1

    def close(self) -> None:
        for server in (self.follower, self.leader, *self.hosts):
            server.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
    finally:
        fleet.close()


def test_an_upload_at_a_gateway_that_follows_reaches_all_hosts_while_it_still_comes(fleet, new_weights, on_new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    half, before = len(body) // 2, [host.api.received for host in fleet.hosts]

    def halves_in_turn() -> Iterator[bytes]:
        yield body[:half]
        until(lambda: fleet.hosts[1].api.received - before[1] > half // 2, 20, "some of it has come")
        assert fleet.follower.files() and not fleet.leader.files()
        yield body[half:]

    headers = BYTES | {"Content-Length": str(len(body))}
    with httpx.Client(base_url=fleet.follower.url, timeout=60) as client:
        reply = client.post("/v1/update_weights?version=streamed", content=halves_in_turn(), headers=headers)
    assert reply.status_code == 200, reply.text
    assert [entry["status"] for entry in reply.json()["result"]["replicas"]] == ["done", "done"]
    sent = [host.api.received - count for host, count in zip(fleet.hosts, before, strict=True)]
    assert all(len(body) < count < 1.1 * len(body) for count in sent), "each byte once"
    assert len(checksums([host.server for host in fleet.hosts])) == 1 and fleet.versions() == {"streamed"}
    for server in (*(host.server for host in fleet.hosts), fleet.leader, fleet.follower):
        assert server.complete(PROMPT, max_tokens=40, ignore_eos=True)["token_ids"] == on_new_weights["token_ids"]
    fleet.wait_no_file()


def test_parts_and_adapters_at_a_gateway_that_follows_reach_all_hosts(fleet, new_weights, tmp_path):
    session = fleet.follower.post("/v1/weights/begin", {"version": "halves"}).result["session_id"]
    for part in halves(new_weights):
        fleet.follower.request("POST", f"/v1/weights/chunk?session_id={session}", part).ok()
    assert fleet.follower.post("/v1/weights/commit", {"session_id": session}).result["version"] == "halves"
    folder = adapter_folder(tmp_path / "a", 1)
    config = (folder / "adapter_config.json").read_text()
    path = httpx.URL("/v1/adapters/load", params={"lora_name": "a", "config": config})
    fleet.follower.request("POST", str(path), (folder / "adapter_model.safetensors").read_bytes()).ok()
    servers = [*(host.server for host in fleet.hosts), fleet.leader, fleet.follower]
    answers = [server.complete(PROMPT, model="a", max_tokens=20, ignore_eos=True)["token_ids"] for server in servers]
    assert all(answer == answers[0] for answer in answers)
    fleet.leader.post("/v1/adapters/unload", {"lora_name": "a"}).ok()
    fleet.wait_no_file()


def test_a_refusal_is_the_same_at_both_gateways(fleet):
    answers = []
    for door in (fleet.leader, fleet.follower):
        reply = door.request("POST", "/v1/update_weights", b"no safetensors file" * 100_000)
        error = reply.json["error"]
        answers.append((reply.status, error["code"], [entry["status"] for entry in error["replicas"]]))
    assert answers[0] == answers[1] and answers[0][0] == 400, answers
    fleet.wait_no_file()


def test_a_leader_that_is_killed_in_an_upload_leaves_the_weights_as_they_were(fleet, new_weights):
    body = (new_weights / "model.safetensors").read_bytes()
    (before,) = fleet.versions()

    def kills() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        os.kill(fleet.leader.gateway_pid, signal.SIGKILL)
        yield body[len(body) // 2 :]

    headers = BYTES | {"Content-Length": str(len(body))}
    with httpx.Client(base_url=fleet.follower.url, timeout=60) as client:
        reply = client.post("/v1/update_weights?version=killed", content=kills(), headers=headers)
    assert reply.json()["error"]["code"] in ("session_not_found", "engine_dead"), reply.text
    assert fleet.versions() == {before}
    fleet.wait_no_file()
    assert fleet.follower.request("POST", "/v1/update_weights?version=again", body).result["version"] == "again"
    assert fleet.versions() == {"again"}
