"""A real fleet on several nodes of real Ray, all on this machine, with gateways among the actors. Nodes come and go
while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import PROMPT, SMALL, until
from entrypoints.test_ray_fleet import KEY, RAY_SETTINGS, node, parent_of, raylet_of

pytestmark = [pytest.mark.slow, pytest.mark.ray]
WAIT_S = 240.0
FLEET = "doors"
CONTROL = "control-key-of-this-test"


class RayCommand:
    """``fastdeploy fleet --ray --gateways``. urls: of its gateways, as it printed them last."""

    def __init__(self, address: str, folder: Path, *flags: str):
        self.log = folder / "log"
        for name, secret in (("fleet.key", KEY), ("control.key", CONTROL)):
            (folder / name).write_text(secret)
        files = ["--fleet-key-file", str(folder / "fleet.key"), "--control-key", str(folder / "control.key")]
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "fleet", "--ray", address, "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *files, *flags, *SMALL], stdout=log, stderr=log, env={**os.environ, **RAY_SETTINGS}
            )

    @property
    def urls(self) -> list[str]:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("FastDeploy fleet of")]
        return lines[-1].partition(" at ")[2].split(", ") if lines else []

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def gateway_pids() -> list[int]:
    """Return the processes of this machine that are gateways of this fleet."""
    words, found = (b"fastdeploy.entrypoints.gateway\0", f'"name":"{FLEET}"'.encode()), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if all(word in command for word in words):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def on_node(pid: int) -> int:
    """Return the raylet of the node on which a process of an actor runs."""
    return parent_of(parent_of(pid))


class Clients:
    """Sends requests through whichever gateway answers, as a client behind a balancer does. slowest_s: of all requests,
    from their first try on. failures: tries that failed, by what the client saw."""

    def __init__(self, fleet: RayCommand):
        self._fleet, self._stopped = fleet, threading.Event()
        self.num, self.slowest_s, self.failures, self.texts = 0, 0.0, list[str](), set[tuple[int, ...]]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        tries, began = 0, time.monotonic()
        while not self._stopped.is_set():
            url = self._fleet.urls[tries % len(self._fleet.urls)]
            tries += 1
            try:
                reply = httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(60, connect=5))
                reply.raise_for_status()
            except httpx.HTTPError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
                continue
            self.texts.add(tuple(reply.json()["choices"][0]["token_ids"]))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.num, began = self.num + 1, time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a Ray cluster with a head and two nodes, each with room for one replica."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=node(0))
        yield cluster
        cluster.shutdown()


@pytest.mark.timeout(1200)
def test_nodes_with_gateways_and_replicas_come_and_go_while_requests_run(cluster, tmp_path):
    nodes = [cluster.add_node(**node(1)) for _ in range(2)]
    fleet = RayCommand(cluster.address, tmp_path, "--replicas", "2", "--gateways", "3", "--name", FLEET)
    try:
        until(lambda: len(fleet.urls) == 3, WAIT_S, "three gateways serve")

        def members(url: str) -> int:
            try:
                reply = httpx.get(f"{url}/v1/replicas", timeout=10).json()
            except httpx.HTTPError:
                return 0
            return sum(replica["state"] == "member" for replica in reply["replicas"])

        until(lambda: all(members(url) == 2 for url in fleet.urls), WAIT_S, "every gateway has two members")
        for url in fleet.urls:
            assert control(url, "/v1/pause", hold_id=url)["is_paused"]
        for url in reversed(fleet.urls):
            assert control(url, "/v1/resume", hold_id=url)["released"] == [url]
        gateways = {pid: on_node(pid) for pid in gateway_pids()}
        held = {raylet_of(one): list(gateways.values()).count(raylet_of(one)) for one in nodes}
        print(f"gateways on the two nodes: {list(held.values())}, on the head: {3 - sum(held.values())}")
        victim = max(nodes, key=lambda one: held[raylet_of(one)])
        assert held[raylet_of(victim)], "no gateway runs on a node that can be lost"
        clients = Clients(fleet)
        until(lambda: clients.num >= 5, WAIT_S, "requests are answered")
        before, began = set(fleet.urls), time.monotonic()
        cluster.remove_node(victim, allow_graceful=False)
        seen = clients.num
        until(lambda: clients.num >= seen + 3, WAIT_S, "requests are answered without the node")
        print(f"3 more requests were answered {time.monotonic() - began:.1f} s after the loss of a node")
        until(lambda: set(fleet.urls) != before, WAIT_S, "the lost gateway serves elsewhere")
        print(f"the gateway of the node served elsewhere after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        cluster.add_node(**node(1))
        until(lambda: all(members(url) == 2 for url in fleet.urls), WAIT_S, "two members at every gateway again")
        print(f"the replica of the node was a member {time.monotonic() - began:.1f} s after another node came")
        clients.stop()
        print(f"{clients.num} requests, the slowest {clients.slowest_s:.1f} s, tries that failed: {clients.failures}")
        assert len(clients.texts) == 1, "every answer has the same tokens"
        assert control(fleet.urls[0], "/v1/pause", hold_id="last")["is_paused"]
    finally:
        status = fleet.stop()
        print(fleet.log.read_text()[-3000:])
    assert status == 0 and KEY not in fleet.log.read_text()
    until(lambda: not gateway_pids(), 60, "the gateways have ended")


def control(url: str, path: str, **fields: Any) -> Any:
    """Make a control call that must succeed, and return its result."""
    headers = {"Authorization": f"Bearer {CONTROL}"}
    reply = httpx.post(url + path, json=fields, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]
