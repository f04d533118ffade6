"""A fleet on real Ray: two nodes on this machine, with scripted replicas, and once with real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import SMALL, until
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import is_alive
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.ray_actors import RayConfig
from fastdeploy.entrypoints.ray_launcher import RayLauncher
from fastdeploy.entrypoints.ray_replica import ReplicaSpec
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.testing.process import free_port
from support.ray_cluster import FLEET_KEY, SETTINGS, actor_of, add_node, ray_cluster, raylet_above, raylet_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.anyio]
SECRETS = {"FASTDEPLOY_FLEET_KEY": FLEET_KEY}


def spec_of(model: str, module: str = "support.fake_replica_main") -> ReplicaSpec:
    return ReplicaSpec(ReplicaConfig(EngineConfig(model=model), ServeConfig(model=model)), module=module)


SPEC = spec_of(str(MODEL_DIR))
WAIT_S = 240.0  # a limit, however busy the machine is


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with one node that has room for two replicas."""
    with ray_cluster(head_cpus=2) as cluster:
        yield cluster


class Follower:
    """Reads the placements of a launcher."""

    def __init__(self, launcher: RayLauncher):
        self.launcher = launcher
        self._iterator: AsyncIterator[Sequence[Placement]] = launcher.placements()

    async def until(self, condition: Callable[[dict[str, Placement]], bool]) -> dict[str, Placement]:
        """Return the first placements, by name, that fulfil the condition."""
        while True:
            placements = await asyncio.wait_for(anext(self._iterator), WAIT_S)
            by_name = {placement.name: placement for placement in placements}
            if condition(by_name):
                return by_name


def pid_of(placement: Placement) -> int:
    """Return the process of a scripted replica."""
    return int(placement.host.partition(",")[0])


def names(*wanted: str) -> Callable[[dict[str, Placement]], bool]:
    return lambda placements: placements.keys() == set(wanted)


@asynccontextmanager
async def fleet(cluster: Any, name: str, replicas: int = 2, spec: ReplicaSpec = SPEC, **settings: Any):
    config = RayConfig(name=name, replicas=replicas, address=cluster.address, **settings)
    launcher = RayLauncher(config, spec, SECRETS)
    try:
        yield Follower(launcher)
    finally:
        await launcher.close()


async def test_replicas_have_names_and_the_key_and_end_with_the_fleet(cluster):
    async with fleet(cluster, "names") as follower:
        placements = await follower.until(names("replica-0", "replica-1"))
        import ray

        assert sorted(ray.util.list_named_actors(all_namespaces=True), key=str) == [
            {"name": f"replica-{i}", "namespace": "fastdeploy-names"} for i in range(2)
        ]
        pids = [pid_of(placement) for placement in placements.values()]
        for placement in placements.values():
            assert placement.host.endswith(f",{len(FLEET_KEY)}") and placement.endpoint.startswith("tcp://")
            assert FLEET_KEY.encode() not in Path(f"/proc/{pid_of(placement)}/cmdline").read_bytes()
        await follower.launcher.remove("replica-1")
        await follower.until(names("replica-0"))
        assert await follower.launcher.add() == "replica-1"
        placements = await follower.until(names("replica-0", "replica-1"))
        pids += [pid_of(placement) for placement in placements.values()]
    until(lambda: not any(map(is_alive, pids)), WAIT_S, "the processes have ended")


@pytest.mark.parametrize(
    "how", ["the replica dies", "the replica is stopped", "the actor dies", "the actor is stopped", "it is fenced"]
)
async def test_a_replica_that_is_lost_comes_back_under_its_name(cluster, how):
    async with fleet(cluster, "lost") as follower:
        placements = await follower.until(names("replica-0", "replica-1"))
        old = {name: pid_of(placement) for name, placement in placements.items()}
        pid, actor = old["replica-0"], actor_of(old["replica-0"])
        if how == "the replica dies":
            os.kill(pid, signal.SIGKILL)
        elif how == "the replica is stopped":
            os.kill(pid, signal.SIGSTOP)
        elif how == "the actor dies":
            os.kill(actor, signal.SIGKILL)
        elif how == "it is fenced":
            os.kill(pid, signal.SIGSTOP)
            await follower.launcher.restart("replica-0", "it is silent")
        else:
            os.kill(actor, signal.SIGSTOP)
            await follower.launcher.restart("replica-0", "it is silent")
        placements = await follower.until(lambda placements: pid_of(placements["replica-0"]) != pid)
        assert placements.keys() == old.keys() and pid_of(placements["replica-1"]) == old["replica-1"]
        until(lambda: not is_alive(pid) and not is_alive(actor), WAIT_S, "the lost processes have ended")


async def test_the_next_gateway_finds_the_replicas(cluster):
    async with fleet(cluster, "next") as follower:
        before = await follower.until(names("replica-0", "replica-1"))
        await follower.launcher.detach()
        async with fleet(cluster, "next", replicas=3, replica_cpus=0.5) as second:
            after = await second.until(lambda placements: len(placements) >= 2)
            assert {name: after[name] for name in before} == before


async def test_a_gateway_that_is_killed_leaves_its_replicas(cluster):
    """The gateway is another process, which is killed without a chance to end its replicas."""
    code = (
        "import asyncio, sys; from entrypoints.test_ray_fleet import *\n"
        "class Address: address = sys.argv[1]\n"
        "async def main():\n"
        "    async with fleet(Address, 'killed') as follower:\n"
        "        placements = await follower.until(names('replica-0', 'replica-1'))\n"
        "        print('PIDS', *(pid_of(placements[f'replica-{i}']) for i in range(2)), flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, cluster.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **SETTINGS})
    # Ray writes the logs of the replicas to the same output.
    line = next(line for line in process.stdout if line.startswith("PIDS"))
    pids = [int(pid) for pid in line.split()[1:]]
    process.kill()
    process.wait()
    process.stdout.close()
    async with fleet(cluster, "killed") as follower:
        placements = await follower.until(names("replica-0", "replica-1"))
        assert [pid_of(placements[f"replica-{i}"]) for i in range(2)] == pids


async def test_a_node_that_comes_gets_the_replica_that_waits_and_one_that_goes_gives_it_back(cluster):
    async with fleet(cluster, "nodes", replicas=3) as follower:
        assert len(await follower.until(lambda placements: len(placements) == 2)) == 2
        first = add_node(cluster, 1)
        placements = await follower.until(lambda placements: len(placements) == 3)
        waited = next(p for p in placements.values() if raylet_above(pid_of(p)) == raylet_of(first))
        spare = add_node(cluster, 1)
        cluster.remove_node(first, allow_graceful=False)
        placements = await follower.until(lambda placements: pid_of(placements[waited.name]) != pid_of(waited))
        assert len(placements) == 3 and raylet_above(pid_of(placements[waited.name])) == raylet_of(spare)
        until(lambda: not is_alive(pid_of(waited)), WAIT_S, "the replica of the lost node has ended")
    cluster.remove_node(spare)


async def test_a_fleet_whose_hosts_lack_the_model_fails_and_names_the_host(cluster):
    async with fleet(cluster, "modelless", spec=spec_of("/no/such/model")) as follower:
        with pytest.raises(InvalidField, match=r"^model: .*host \d+\.\d+\.\d+\.\d+ has no /no/such/model/config.json"):
            await follower.until(names("replica-0", "replica-1"))


async def test_a_fleet_with_other_settings_needs_another_name(cluster):
    async with fleet(cluster, "settings", keep_replicas=True) as follower:
        before = await follower.until(names("replica-0", "replica-1"))
    async with fleet(cluster, "settings", spec=spec_of("other")) as follower:
        with pytest.raises(InvalidField, match="^name: .*replica-. of fleet 'settings' runs with other settings"):
            await follower.until(lambda placements: False)
    async with fleet(cluster, "settings") as follower:
        assert await follower.until(names("replica-0", "replica-1")) == before


async def test_an_address_without_a_cluster_is_named(cluster):
    launcher = RayLauncher(RayConfig(name="nowhere", replicas=1, address="127.0.0.1:1"), SPEC, SECRETS)
    with pytest.raises(InvalidField, match="^ray: expected a Ray cluster at 127.0.0.1:1"):
        await launcher.open()


async def test_real_engines_behind_one_address(cluster, tmp_path):
    """The command itself, until all of it has ended."""
    port = free_port()
    key = tmp_path / "key"
    key.write_text(FLEET_KEY)
    flags = ["--ray", cluster.address, "--name", "real", "--fleet-key-file", str(key), "--port", str(port), *SMALL]
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli", "fleet", *flags]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **SETTINGS})
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def members() -> dict[str, Any] | None:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            replicas = client.get("/v1/replicas").json()["replicas"]
        except (httpx.TransportError, KeyError):
            return None
        joined = {replica["name"]: replica for replica in replicas if replica["state"] == "member"}
        return joined if len(joined) == 2 else None

    try:
        until(members, WAIT_S, "two members")
        body = {"prompt": "1 + 1 =", "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] > 0
    finally:
        client.close()
        process.terminate()
        assert process.wait(WAIT_S) == 0, (tmp_path / "log").read_text()
    assert FLEET_KEY not in (tmp_path / "log").read_text()
    async with fleet(cluster, "real", replicas=1) as follower:
        assert (await follower.until(names("replica-0")))["replica-0"].host.endswith(f",{len(FLEET_KEY)}")
