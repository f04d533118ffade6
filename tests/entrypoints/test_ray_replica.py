"""The actor of one replica, and the flags of a fleet on Ray, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import until
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import is_alive
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli import main
from fastdeploy.entrypoints.process_tree import FAILED
from fastdeploy.entrypoints.ray_actors import RayConfig
from fastdeploy.entrypoints.ray_replica import FastDeployReplica, ReplicaSpec
from fastdeploy.entrypoints.replica_main import ReplicaConfig

pytestmark = pytest.mark.anyio
TESTS = Path(__file__).parents[1]
KEY = "0123456789abcdef" * 2
WAIT_S = 30.0


def spec_of(model: str = str(MODEL_DIR), served: str = "default", stall_s: float = 10.0) -> ReplicaSpec:
    serve = ServeConfig(model=model, served_model_name=served, stall_s=stall_s)
    return ReplicaSpec(ReplicaConfig(EngineConfig(model=model), serve), module="support.fake_replica_main")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS}")


@pytest.fixture
async def actor() -> AsyncIterator[FastDeployReplica]:
    actor = FastDeployReplica("replica-3", spec_of(), "127.0.0.1")
    yield actor
    await actor.stop()


async def test_an_actor_serves_once_it_has_the_key_which_is_on_no_command_line(actor):
    unborn = await actor.status(0)
    assert unborn.placement is None and repr(actor) == "replica-3"
    await actor.start({"FASTDEPLOY_FLEET_KEY": KEY})
    await actor.start({"FASTDEPLOY_FLEET_KEY": KEY})  # another gateway
    status = await asyncio.wait_for(actor.status(unborn.change), WAIT_S)
    placement = status.placement
    assert placement.name == "replica-3" and placement.endpoint.startswith("tcp://127.0.0.1:")
    pid, _, digits = placement.host.partition(",")
    assert int(digits) == len(KEY) and KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert KEY not in repr(vars(actor))
    await actor.stop()
    assert not is_alive(int(pid)) and (await actor.status(status.change)).placement is None


async def test_a_host_without_the_model_is_named(actor):
    actor = FastDeployReplica("replica-0", spec_of("/no/such/model"), "10.1.2.3")
    await actor.start({})
    status = await asyncio.wait_for(actor.status(1), WAIT_S)
    assert status.refusal.startswith("model: host 10.1.2.3 has no /no/such/model/config.json")


async def test_a_refusal_of_the_replica_is_told_with_the_host():
    actor = FastDeployReplica("replica-0", spec_of(served="refuse"), "127.0.0.1")
    await actor.start({})
    status = await asyncio.wait_for(actor.status(1), WAIT_S)
    assert status.refusal == "on host 127.0.0.1: config.json: is broken"
    await actor.stop()


async def test_the_replica_dies_with_its_actor():
    """The actor is a process of its own, which is killed. Its replica cannot end in order, since it is stopped."""
    code = (
        "import asyncio; from entrypoints.test_ray_replica import *\n"
        "async def main():\n"
        "    actor = FastDeployReplica('replica-0', spec_of(), '127.0.0.1')\n"
        "    await actor.start({'FASTDEPLOY_FLEET_KEY': KEY})\n"
        "    print((await actor.status(1)).placement.host, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    lines = [await asyncio.wait_for(process.stdout.readline(), WAIT_S) for _ in range(2)]
    pid = next(int(line.partition(b",")[0]) for line in lines if b"," in line)
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    await process.wait()
    until(lambda: not is_alive(pid), WAIT_S, "the replica has ended")


async def test_a_replica_that_is_stopped_is_killed_and_its_actor_ends(monkeypatch):
    ends = asyncio.Queue[int]()
    monkeypatch.setattr("fastdeploy.entrypoints.ray_actor.os._exit", ends.put_nowait)
    actor = FastDeployReplica("replica-0", spec_of(served="stop", stall_s=0.3), "127.0.0.1")
    await actor.start({"FASTDEPLOY_FLEET_KEY": KEY})
    pid = int((await asyncio.wait_for(actor.status(1), WAIT_S)).placement.host.partition(",")[0])
    assert await asyncio.wait_for(ends.get(), WAIT_S) == FAILED
    assert not is_alive(pid) and (await actor.status(2)).placement is None


def refusal_of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["fleet", *flags])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_without_ray_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refusal_of(capsys, "--ray")
    assert "argument --ray: expected Ray to be installed: pip install 'fastdeploy-cpu[ray]'" in error


def test_a_fleet_on_ray_needs_the_secret_of_the_fleet(monkeypatch, capsys):
    monkeypatch.delenv("FASTDEPLOY_FLEET_KEY", raising=False)
    monkeypatch.setattr("fastdeploy.entrypoints.cli.fleet.import_ray", lambda: None)
    assert "argument --fleet-key-file: expected the secret of the fleet for --ray" in refusal_of(capsys, "--ray")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"address": "ray://head:10001"}, "ray"),
        ({"address": "head"}, "ray"),
        ({"address": "head:99999"}, "ray"),
        ({"name": "a/b"}, "name"),
        ({"replicas": -1}, "replicas"),
        ({"replica_cpus": float("nan")}, "replica_cpus"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], field: str):
    with pytest.raises(InvalidField) as caught:
        RayConfig(**{"name": "default", "replicas": 2, **settings}).check()
    assert caught.value.field == field


def test_the_address_of_a_head_may_be_ipv6():
    assert RayConfig(name="a", replicas=1, address="[fd00::1]:6379").check().host_and_port == ("fd00::1", 6379)
