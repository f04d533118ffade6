"""Weights that pass from host to host over real HTTP: API servers with upload folders of their own, each behind a
proxy. The engines behind them are fakes, which nobody asks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fastdeploy.core.errors import EngineDead, FastDeployError
from fastdeploy.core.weight_source import FileSource
from fastdeploy.fleet import chain
from fastdeploy.fleet.chain import GrowingFile
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.remote import Outcomes, RemoteHosts
from fastdeploy.fleet.staging import EarlySending
from fastdeploy.http.guards.keys import Keys
from support.tcp_proxy import Proxy

SIZE = 6 << 20  # more than the sockets between two hosts can hold, so that a chain can break in the middle of it
KEY = "secret"


class Host:
    """One API server: its upload folder, and its replica, whose address is that of ``proxy``."""

    def __init__(self, name: str, host: str, folder: Path, stack: Any):
        self.folder, self.stack = folder, stack
        self.proxy = Proxy(httpx.URL(stack.server.url).port or 0, "127.0.0.1")
        placement = SimpleNamespace(url=f"http://127.0.0.1:{self.proxy.port}", host=host)
        self.replica: Any = SimpleNamespace(name=name, placement=placement, boot_id=name)

    @property
    def files(self) -> list[Path]:
        return list(self.folder.iterdir())


@pytest.fixture
def make_hosts(make_stack, tmp_path) -> Iterator[Callable[..., list[Host]]]:
    made: list[Host] = []

    def make(num: int, on_one_host: bool = False, **settings: Any) -> list[Host]:
        for i in range(num):
            folder = tmp_path / f"uploads-{i}"
            folder.mkdir()
            stack = make_stack(keys=Keys(control=(KEY.encode(),)), upload_dir=str(folder), **settings)
            made.append(Host(f"r{i}", "h" if on_one_host else f"h{i}", folder, stack))
        return made

    yield make
    for host in made:
        host.proxy.close()


@contextlib.asynccontextmanager
async def remote_hosts(silence_s: float = 20.0, key: str = KEY) -> AsyncIterator[RemoteHosts]:
    config = FleetConfig(fleet_id="f", replica_key=key, stall_s=silence_s, fence_after_s=silence_s)
    remote = RemoteHosts(config)
    try:
        yield remote
    finally:
        await remote.close()


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


def replicas(hosts: Sequence[Host]) -> list[Any]:
    return [host.replica for host in hosts]


def boots(hosts: Sequence[Host]) -> dict[str, str]:
    return {host.replica.name: host.replica.boot_id for host in hosts}


async def until_no_file(*hosts: Host) -> None:
    """Wait until no upload is left."""
    async with asyncio.timeout(20):
        while any(host.files for host in hosts):
            await asyncio.sleep(0.01)


def assert_complete(outcomes: Outcomes, weights: Path, names: Sequence[str]) -> None:
    """Assert that the replicas of these names, and no others, have a file with the weights."""
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, FileSource)} == set(names), outcomes
    for name in names:
        outcome = outcomes[name]
        assert isinstance(outcome, FileSource) and Path(outcome.path).read_bytes() == weights.read_bytes()


async def test_the_bytes_leave_the_gateway_once_and_each_host_passes_them_on(make_hosts, weights):
    hosts = make_hosts(3)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, ["r0", "r1", "r2"])
        assert all(SIZE < host.proxy.received < 1.01 * SIZE for host in hosts)
    await until_no_file(*hosts)


@contextlib.asynccontextmanager
async def half_sent(
    remote: RemoteHosts, hosts: Sequence[Host], weights: Path
) -> AsyncIterator[tuple[GrowingFile, EarlySending]]:
    """Send a file of which only a half is written. The block begins when this half is on its way to the last host."""
    fd = os.open(weights, os.O_RDONLY)
    content = GrowingFile(fd, SIZE)
    sending = EarlySending(remote, replicas(hosts), content)
    content.advance(SIZE // 2)
    async with asyncio.timeout(20):
        while hosts[-1].proxy.received < SIZE // 2:
            await asyncio.sleep(0.01)
    assert not sending._outcomes.done()
    try:
        yield content, sending
    finally:
        await sending.close()
        os.close(fd)


async def test_bytes_are_passed_on_while_the_source_is_still_written(make_hosts, weights):
    hosts = make_hosts(3)
    async with remote_hosts() as remote, half_sent(remote, hosts, weights) as (content, sending):
        content.advance(SIZE - SIZE // 2)
        assert_complete(await sending.outcomes(boots(hosts)), weights, ["r0", "r1", "r2"])
        started_again = boots(hosts) | {"r1": "started again"}
        assert (await sending.outcomes(started_again)).keys() == {"r0", "r2"}
    await until_no_file(*hosts)


async def test_the_end_of_an_upload_in_the_middle_leaves_no_file(make_hosts, weights):
    hosts = make_hosts(2)
    async with remote_hosts() as remote, half_sent(remote, hosts, weights):
        pass
    await until_no_file(*hosts)


@pytest.mark.parametrize(
    ("loss", "at"), [("killed", 0), ("killed", 1), pytest.param("stalled", 1, marks=pytest.mark.slow)]
)
async def test_the_host_before_a_lost_one_goes_around_it_from_the_last_byte_that_is_there(
    make_hosts, weights, monkeypatch, loss, at
):
    hosts, sent = make_hosts(3), []
    send_pieces = chain.HostCalls.send_pieces

    async def recorded(self, pieces, nbytes, hop, behind=(), offset=0):
        sent.append((self is remote._calls, hop.name, offset > 0))
        return await send_pieces(self, pieces, nbytes, hop, behind, offset)

    monkeypatch.setattr(chain.HostCalls, "send_pieces", recorded)
    async with remote_hosts(silence_s=2.0) as remote, half_sent(remote, hosts, weights) as (content, sending):
        if loss == "killed":
            hosts[at].proxy.close()
        else:
            hosts[at].proxy.flows.clear()
        content.advance(SIZE - content.written)
        outcomes = await sending.outcomes(boots(hosts))
        assert_complete(outcomes, weights, [f"r{i}" for i in range(3) if i != at])
        lost = outcomes[f"r{at}"]
        assert isinstance(lost, EngineDead) and f"replica r{at}: its API server" in lost.message
        assert sent[:3] == [(True, "r0", False), (False, "r1", False), (False, "r2", False)]
        assert sent[3] == (at == 0, f"r{at + 1}", True), "its own sender is the host before the lost one"
        if at == 0:
            assert sent[4:] == [(False, "r2", True)]
    hosts[at].proxy.close()
    await until_no_file(*hosts)


async def test_the_file_of_a_host_is_there_though_the_host_before_it_is_lost(make_hosts, weights):
    hosts = make_hosts(3)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        hosts[0].proxy.cut()
        await until_no_file(hosts[0])
        outcomes.pop("r0")
        assert_complete(outcomes, weights, ["r1", "r2"])


async def test_hosts_that_cannot_reach_each_other_get_the_bytes_from_the_gateway(make_hosts, weights, monkeypatch):
    hosts = make_hosts(6)
    tried: list[str] = []
    send_on = chain.HostCalls.send_on

    async def cut_off(self, content, hops, again):
        tried.extend(hop.name for hop in hops)
        return await send_on(
            self, content, [chain.Hop(hop.name, "http://127.0.0.1:9", hop.path) for hop in hops], again
        )

    monkeypatch.setattr(chain.HostCalls, "send_on", cut_off)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, [f"r{i}" for i in range(6)])
    assert tried == ["r1", "r2", "r3", "r4", "r5", "r5"], "after three failures the next host is left to the gateway"


async def test_an_early_refusal_has_the_name_of_the_replica_and_its_reason(make_hosts, weights, monkeypatch):
    hosts = make_hosts(2, max_upload_mb=5)
    async with remote_hosts() as remote, remote.staged(replicas(hosts[1:]), FileSource(str(weights))) as outcomes:
        refused = outcomes["r1"]
        assert isinstance(refused, FastDeployError) and refused.code == "request_too_large"
        assert refused.message.startswith("replica r1: ") and hosts[1].proxy.received < SIZE // 2


async def test_a_disk_that_is_full_in_the_middle_is_a_refusal_and_the_others_have_the_bytes(
    make_hosts, weights, monkeypatch
):
    from fastdeploy.http.fleet import spool

    hosts = make_hosts(3)
    write_at = spool.write_at

    def full(fd: int, offset: int, data: Any) -> None:
        if "uploads-1" in os.readlink(f"/proc/self/fd/{fd}") and offset > SIZE // 2:
            raise OSError(28, "No space left on device")
        write_at(fd, offset, data)

    monkeypatch.setattr(spool, "write_at", full)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, ["r0", "r2"])
        refused = outcomes["r1"]
        assert isinstance(refused, FastDeployError) and refused.code == "out_of_space"
        assert refused.message.startswith("replica r1: no room")


async def test_a_wrong_key_is_a_refusal(make_hosts, weights):
    hosts = make_hosts(1)
    source = FileSource(str(weights))
    async with remote_hosts(key="wrong") as remote, remote.staged(replicas(hosts), source) as outcomes:
        refused = outcomes["r0"]
        assert isinstance(refused, FastDeployError) and refused.code == "invalid_api_key"


async def test_replicas_of_one_host_share_one_file_and_each_keeps_it(make_hosts, weights):
    hosts = make_hosts(3, on_one_host=True)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, ["r0", "r1", "r2"])
        assert sum(host.proxy.received for host in hosts) < 1.1 * SIZE
        hosts[0].proxy.cut()
        await until_no_file(hosts[0])
        outcomes.pop("r0")
        assert_complete(outcomes, weights, ["r1", "r2"])


async def test_replicas_with_one_address_that_share_no_files_get_one_each(make_hosts, weights, monkeypatch):
    hosts = make_hosts(2, on_one_host=True)

    def other_file_system(*args: Any, **options: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, ["r0", "r1"])
        assert all(host.proxy.received > SIZE for host in hosts)


async def test_a_shared_file_is_filled_through_another_replica_if_the_first_one_is_lost(make_hosts, weights):
    hosts = make_hosts(2, on_one_host=True)
    hosts[0].proxy.break_at = SIZE // 2
    async with remote_hosts() as remote, remote.staged(replicas(hosts), FileSource(str(weights))) as outcomes:
        assert_complete(outcomes, weights, ["r1"])
        assert isinstance(outcomes["r0"], EngineDead)


async def test_a_copy_is_sent_to_the_address_of_a_server_only(make_hosts):
    [host] = make_hosts(1)
    key, body = {"Authorization": f"Bearer {KEY}"}, {"to": {"name": "r7", "url": "file:///etc"}}
    async with httpx.AsyncClient(headers=key, base_url=host.stack.server.url) as client:
        reply = await client.post(chain.SEND, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "to.url")


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("PUT", {"path": "/etc/passwd", "nbytes": 3, "plan": 0}, "body"),
        ("PUT", {"path": "UPLOADS/fastdeploy-upload-none", "nbytes": 3, "plan": 0}, "path"),
        ("PUT", {"path": "FILE", "nbytes": 3, "plan": 3}, "plan"),
        ("PUT", {"path": "FILE", "nbytes": 7, "plan": 2}, "nbytes"),
        ("GET", {"path": "/etc/passwd"}, "body"),
    ],
)
async def test_a_call_that_is_wrong_names_its_field(make_hosts, method, params, field):
    [host] = make_hosts(1)
    key, octets, url = {"Authorization": f"Bearer {KEY}"}, {"Content-Type": "application/octet-stream"}, chain.SPOOL
    body: dict[str, Any] = {"content": b"[]abc", "headers": octets} if method == "PUT" else {}
    client = httpx.AsyncClient(headers=key, base_url=host.stack.server.url)
    async with client, client.stream("POST", url, json={"nbytes": 3}) as reserved:
        assert reserved.status_code == 200
        [file] = host.files
        path = params["path"].replace("FILE", str(file)).replace("UPLOADS", str(host.folder))
        reply = await client.request(method, url, params=params | {"path": path}, **body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
