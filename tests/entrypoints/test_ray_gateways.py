"""A real fleet on several nodes of real Ray, all on this machine, with gateways among the actors. Nodes come and go
while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import PROMPT, SMALL, until
from fastdeploy.core.process import descendants, is_alive
from fastdeploy.embedded import MODEL_DIR
from support.ray_cluster import FLEET_KEY, SETTINGS, add_node, ray_cluster, raylet_of

pytestmark = [pytest.mark.slow, pytest.mark.ray]
WAIT_S = 240.0
FLEET = "doors"
CONTROL = "control-key-of-this-test"


class RayCommand:
    """``fastdeploy fleet --ray --gateways``. urls: of its gateways, as it printed them last."""

    def __init__(self, address: str, folder: Path, *flags: str):
        self.log = folder / "log"
        for name, secret in (("fleet.key", FLEET_KEY), ("control.key", CONTROL)):
            (folder / name).write_text(secret)
        files = ["--fleet-key-file", str(folder / "fleet.key"), "--control-key", str(folder / "control.key")]
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "fleet", "--ray", address, "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *files, *flags, *SMALL], stdout=log, stderr=log, env={**os.environ, **SETTINGS}
            )

    @property
    def urls(self) -> list[str]:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("FastDeploy fleet of")]
        return lines[-1].partition(" at ")[2].split(", ") if lines else []

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def pids_of(module: str, *words: str) -> list[int]:
    """Return the processes of this machine that run a module and have these words in their arguments."""
    wanted, found = [f"{module}\0", *words], []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text(errors="replace")
        except OSError:
            continue
        if all(word in command for word in wanted):
            found.append(int(path.parent.name))
    return found


def gateway_pids() -> list[int]:
    """Return the processes that are gateways of this fleet."""
    return pids_of("fastdeploy.entrypoints.gateway", f'"name":"{FLEET}"')


def gateways_on(node: Any) -> list[int]:
    return sorted(set(gateway_pids()) & set(descendants(raylet_of(node))))


def replicas_on(node: Any) -> list[int]:
    return sorted(set(pids_of("fastdeploy.entrypoints.replica_main")) & set(descendants(raylet_of(node))))


def members(url: str) -> list[dict[str, Any]]:
    """Return the members that a gateway has; none if it does not answer."""
    try:
        reply = httpx.get(f"{url}/v1/replicas", timeout=10).json()
    except httpx.HTTPError:
        return []
    return [replica for replica in reply["replicas"] if replica["state"] == "member"]


class Clients:
    """Sends requests through whichever gateway answers, as a client behind a balancer does. slowest_s: of all requests,
    from their first try on. failures: counts of tries that failed, by what the client saw."""

    def __init__(self, fleet: RayCommand):
        self._fleet, self._stopped = fleet, threading.Event()
        self.num, self.slowest_s, self.failures, self.texts = 0, 0.0, Counter[str](), set[tuple[int, ...]]()
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
                self.failures[f"{type(error).__name__}: {error}"] += 1
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
    """A cluster whose head has no room for a replica."""
    with ray_cluster(head_cpus=0) as cluster:
        yield cluster


@pytest.mark.timeout(1200)
def test_nodes_with_gateways_and_replicas_come_and_go_while_requests_run(cluster, tmp_path):
    nodes = [add_node(cluster, 1) for _ in range(2)]
    fleet = RayCommand(cluster.address, tmp_path, "--replicas", "2", "--gateways", "3", "--name", FLEET)

    def until_each_has(number: int, what: str) -> None:
        """Wait until all three gateways serve, and each of them has this number of members."""
        until(lambda: len(fleet.urls) == 3 and all(len(members(url)) == number for url in fleet.urls), WAIT_S, what)

    try:
        until_each_has(2, "every gateway has two members")
        for url in fleet.urls:
            assert control(url, "/v1/pause", hold_id=url)["is_paused"]
        for url in reversed(fleet.urls):
            assert control(url, "/v1/resume", hold_id=url)["released"] == [url]
        while not any(map(gateways_on, nodes)):  # Ray may put all of them on the head, which is not lost here
            os.kill(gateway_pids()[0], signal.SIGKILL)
            until_each_has(2, "a gateway that was killed serves again")
        print(f"gateways on the two nodes: {[len(gateways_on(one)) for one in nodes]}, the others on the head")
        victim, other = sorted(nodes, key=lambda one: len(gateways_on(one)), reverse=True)
        lost = {*gateways_on(victim), *replicas_on(victim)}
        assert replicas_on(victim) and replicas_on(other), "each of the two nodes has one of the replicas"
        clients = Clients(fleet)
        until(lambda: clients.num >= 5, WAIT_S, "requests are answered")
        print(f"load averages: {os.getloadavg()}")
        began = time.monotonic()
        cluster.remove_node(victim, allow_graceful=False)
        seen = clients.num
        until(lambda: clients.num >= seen + 3, WAIT_S, "requests are answered without the node")
        print(f"3 more requests were answered {time.monotonic() - began:.1f} s after the loss of a node")
        until_each_has(1, "the lost gateways serve elsewhere, with the member that is left")
        print(f"the gateways of the node served elsewhere {time.monotonic() - began:.1f} s after its loss")
        until(lambda: not any(map(is_alive, lost)), WAIT_S, "what ran on the lost node has ended")
        control(fleet.urls[0], "/v1/update_weights", model_path=str(MODEL_DIR), version="after-the-loss")
        began = time.monotonic()
        added = add_node(cluster, 1)
        until_each_has(2, "two members at every gateway again")
        print(f"the replica of the node was a member {time.monotonic() - began:.1f} s after another node came")
        assert replicas_on(added), "the lost replica has come back on the node that was added"
        versions = {replica["version"] for url in fleet.urls for replica in members(url)}
        assert versions == {"after-the-loss"}, "the replica joined with the weights of the fleet"
        clients.stop()
        print(f"load averages: {os.getloadavg()}")
        print(f"{clients.num} requests, the slowest {clients.slowest_s:.1f} s; failed tries: {dict(clients.failures)}")
        assert len(clients.texts) == 1, "every answer has the same tokens"
        assert control(fleet.urls[0], "/v1/pause", hold_id="last")["is_paused"]
    finally:
        status = fleet.stop()
        print(fleet.log.read_text()[-3000:])
    assert status == 0 and FLEET_KEY not in fleet.log.read_text()
    until(lambda: not gateway_pids(), 60, "the gateways have ended")


def control(url: str, path: str, **fields: Any) -> Any:
    """Make a control call that must succeed, and return its result."""
    headers = {"Authorization": f"Bearer {CONTROL}"}
    reply = httpx.post(url + path, json=fields, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]
