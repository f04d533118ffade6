"""Uploads at a gateway that follows, whose files only that gateway can read: the replicas are on other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.server import until
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.weight_source import FileSource, Source
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.http.guards.keys import Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import FakeEngine, FakeGateway
from fleet.gateways import gateways, link_at
from support.http_stack import Server
from support.tcp_proxy import Proxy

KEY = "secret"
SIZE = 6 << 20  # more than the sockets between two hosts can hold
ADAPTER = b"a3".ljust(SIZE)
DONE = {"r0": "done", "r1": "done"}
BYTES = {"Content-Type": "application/octet-stream"}


class Host(FakeEngine):
    """A replica on a host of its own, with an API server behind a proxy, and an upload folder."""

    def __init__(self, name: str, folder: Path):
        folder.mkdir()
        self.folder = folder
        super().__init__(name, {"upload_dir": str(folder), "model_roots": ()}, {})
        config = ServeConfig(model="fake", served_model_name="tiny", upload_dir=str(folder), keepalive_s=0.2)
        self.api = Server(self.endpoint, None, config, Keys(control=(KEY.encode(),)))
        self.proxy = Proxy(httpx.URL(self.api.url).port or 0, "127.0.0.1")

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.endpoint, f"http://127.0.0.1:{self.proxy.port}", f"host of {self.name}")

    @property
    def version(self) -> str:
        return self.engine.scopes.whole.weights_label()["version"]

    def close(self) -> None:
        self.proxy.close()
        self.api.stop()
        super().close()


class Fleet:
    """Two replicas, each on another host, and two gateways. Those of ``keys`` are the gateways' keys for the hosts."""

    def __init__(self, folder: Path, keys: tuple[str, str]):
        self.hosts = [Host(f"r{i}", folder / f"uploads-{i}") for i in range(2)]
        self._ipc = ipc_dir.create()
        self.doors: list[FakeGateway] = []
        for i, key in enumerate(keys):
            own = folder / f"gateway-{i}"
            own.mkdir()
            self.follower_uploads = own  # of the last one
            self.doors.append(self._gateway(f"ipc://{self._ipc}/gateway-{i}.sock", own, key))
            self.doors[-1].wait_members(2)
        self.leader, self.follower = self.doors
        assert self.leader.client.membership.leadership.leads

    def _gateway(self, address: str, folder: Path, key: str) -> FakeGateway:
        config = FleetConfig(fleet_id="f", replica_key=key, fence_after_s=5.0, stall_s=5.0, lease_s=3.0)
        launcher = lambda: StaticLauncher([host.placement for host in self.hosts])  # noqa: E731
        return FakeGateway(config, launcher, lambda: link_at(address), upload_dir=str(folder))

    @property
    def versions(self) -> list[str]:
        return [host.version for host in self.hosts]

    def wait_no_file(self) -> None:
        until(lambda: not any(list(host.folder.iterdir()) for host in self.hosts), 20, "no upload is left")

    def close(self) -> None:
        for door in reversed(self.doors):
            door.end_gateway()
        for host in self.hosts:
            host.close()
        ipc_dir.remove(self._ipc)


@pytest.fixture
def make_fleet(tmp_path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(*keys: str) -> Fleet:
        made.append(Fleet(tmp_path, keys or (KEY, KEY)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(make_fleet) -> Fleet:
    return make_fleet()


def never_sends(door: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each try of a gateway to send a file fail, as on a host that does not have the file."""

    def fail(*_: object) -> Any:
        raise AssertionError("this gateway does not have the file")

    for name in ("staged", "sent"):
        monkeypatch.setattr(door.client.membership.hosts, name, fail)


def weights(number: int) -> bytes:
    return f"w{number}".encode().ljust(SIZE)


def upload(door: FakeGateway, version: str, content: Any) -> httpx.Response:
    headers = BYTES | {"Content-Length": str(SIZE)}
    return door.http.post(f"/v1/update_weights?version={version}", content=content, headers=headers)


def load(door: FakeGateway, content: Any) -> httpx.Response:
    """Upload an adapter."""
    params = {"lora_name": "a", "config": "{}"}
    headers = BYTES | {"Content-Length": str(SIZE)}
    return door.http.post("/v1/adapters/load", params=params, content=content, headers=headers)


def statuses(reply: httpx.Response) -> dict[str, str]:
    assert reply.status_code == 200, reply.text
    return {entry["name"]: entry["status"] for entry in reply.json()["result"]["replicas"]}


def test_an_upload_at_a_follower_reaches_the_last_host_while_it_still_comes_and_not_through_the_leader(
    fleet, monkeypatch
):
    never_sends(fleet.leader, monkeypatch)
    data, last = weights(5), fleet.hosts[1].proxy

    def halves() -> Iterator[bytes]:
        yield data[: SIZE // 2]
        until(lambda: last.received > SIZE // 2 - (1 << 20), 20, "half of it has come")
        yield data[SIZE // 2 :]

    assert statuses(upload(fleet.follower, "early", halves())) == DONE
    assert fleet.versions == ["early"] * 2
    assert all(SIZE < host.proxy.received < 1.1 * SIZE for host in fleet.hosts), "each byte once"
    fleet.wait_no_file()


def test_parts_and_adapters_at_a_follower_are_uploads_too(fleet, monkeypatch):
    never_sends(fleet.leader, monkeypatch)
    http = fleet.follower.http
    session = http.post("/v1/weights/begin", json={"version": "parts"}).json()["result"]["session_id"]
    for number in (1, 2):
        part = http.post(f"/v1/weights/chunk?session_id={session}", content=f"w{number}".encode(), headers=BYTES)
        assert part.status_code == 200, part.text
    assert statuses(http.post("/v1/weights/commit", json={"session_id": session})) == DONE
    assert statuses(load(fleet.follower, ADAPTER)) == DONE
    assert fleet.versions == ["parts"] * 2
    fleet.wait_no_file()


def test_a_refused_upload_has_the_same_error_at_every_gateway(fleet):
    answers = []
    for door in fleet.doors:
        reply = upload(door, "bad", b"x".ljust(SIZE))
        error = reply.json()["error"]
        answers.append((reply.status_code, error["code"], [entry["status"] for entry in error["replicas"]]))
    assert answers[0] == answers[1] and answers[0][:2] == (400, "weight_update_refused"), answers
    assert fleet.versions == ["0"] * 2
    fleet.wait_no_file()


def test_a_client_that_goes_away_leaves_no_file_and_no_session(fleet):
    def half() -> Iterator[bytes]:
        yield weights(1)[: SIZE // 2]
        until(lambda: fleet.hosts[1].proxy.received > SIZE // 2 - (1 << 20), 20, "half of it has come")
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        upload(fleet.follower, "half", half())
    fleet.wait_no_file()
    until(lambda: not fleet.leader.client.membership.state.changing, 20, "nothing is open")
    assert statuses(upload(fleet.follower, "whole", weights(2))) == DONE
    assert fleet.versions == ["whole"] * 2


def test_a_host_that_is_lost_in_an_upload_at_a_follower_is_fenced_and_the_others_have_the_weights(fleet):
    data = weights(3)

    def breaks() -> Iterator[bytes]:
        yield data[: SIZE // 2]
        fleet.hosts[1].proxy.break_at = 0
        yield data[SIZE // 2 :]

    assert statuses(upload(fleet.follower, "one", breaks())) == {"r0": "done"}
    assert fleet.versions == ["one", "0"]
    assert fleet.leader.replica("r1") not in fleet.leader.client.membership.quorum


def test_a_follower_that_reaches_no_host_fences_nobody(fleet):
    for host in fleet.hosts:
        host.proxy.close()
    lives = lambda: [fleet.leader.replica(name).lives for name in ("r0", "r1")]  # noqa: E731
    before = lives()
    reply = upload(fleet.follower, "none", weights(4))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead"), reply.text
    assert lives() == before, "nobody was fenced"
    assert fleet.versions == ["0"] * 2


def test_a_wrong_key_of_a_follower_is_its_error_and_changes_nothing(make_fleet):
    fleet = make_fleet(KEY, "wrong")
    reply = upload(fleet.follower, "wrong", weights(4))
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), reply.text
    assert fleet.versions == ["0"] * 2
    assert statuses(upload(fleet.leader, "right", weights(5))) == DONE


def test_a_member_that_the_follower_does_not_count_yet_gets_a_copy_too(fleet, monkeypatch):
    staging = fleet.follower.client._staging
    needed = staging.needed

    def of_an_older_view(source: Source) -> dict[str, str]:
        return {name: boot for name, boot in needed(source).items() if name != "r1"}

    monkeypatch.setattr(staging, "needed", of_an_older_view)
    http = fleet.follower.http
    assert statuses(http.post("/v1/update_weights?version=both", content=b"w5", headers=BYTES)) == DONE
    assert fleet.versions == ["both"] * 2
    fleet.wait_no_file()


def test_a_copy_for_an_earlier_engine_does_not_count(fleet):
    stale = m.SentCallArgs(m.UpdateWeightsArgs(FileSource("/w1")), "host of the gateway", {"r0": m.Copy("earlier")})
    uncopied = fleet.leader.run(fleet.leader.client.call(stale))["uncopied"]
    assert uncopied == {name: fleet.leader.replica(name).boot_id for name in ("r0", "r1")}
    assert fleet.versions == ["0"] * 2


def test_a_replica_that_joins_after_the_sending_began_gets_a_copy(fleet):
    fleet.hosts[1].kill()
    for door in fleet.doors:
        until(lambda door=door: len(door.client.membership.quorum) == 1, 20, "the loss is noticed")

    def comes_back() -> Iterator[bytes]:
        yield ADAPTER[: SIZE // 2]
        fleet.hosts[1].start()
        fleet.leader.wait_members(2)
        yield ADAPTER[SIZE // 2 :]

    assert statuses(load(fleet.follower, comes_back())) == DONE
    fleet.wait_no_file()


def leads_instead(fleet: Fleet, data: bytes) -> Iterator[bytes]:
    """Yield ``data``. In the middle the gateway that leads ends, and the one that follows takes the lead."""
    yield data[: SIZE // 2]
    until(lambda: any(fleet.follower_uploads.iterdir()), 20, "the calls before the upload are answered")
    fleet.doors.remove(fleet.leader)
    fleet.leader.end_gateway()
    until(lambda: fleet.follower.client.membership.leadership.leads, 20, "the other one leads")
    fleet.follower.wait_members(2)
    yield data[SIZE // 2 :]


def test_a_follower_that_leads_at_the_end_of_the_upload_makes_the_call_itself(fleet):
    assert statuses(load(fleet.follower, leads_instead(fleet, ADAPTER))) == DONE
    fleet.wait_no_file()


def test_weights_whose_session_ends_with_its_leader_are_committed_nowhere(fleet):
    reply = upload(fleet.follower, "lost", leads_instead(fleet, weights(7)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found"), reply.text
    assert fleet.versions == ["0"] * 2
    fleet.wait_no_file()


def test_a_call_fails_if_the_follower_does_not_find_a_member_of_the_leader(fleet, monkeypatch):
    staging = fleet.follower.client._staging
    monkeypatch.setattr(staging, "_config", msgspec.structs.replace(staging._config, fence_after_s=0.1))
    with pytest.raises(EngineDead, match="no connection to r9: nothing was changed"):
        fleet.follower.run(staging._connected({"r9": "boot"}))


def test_on_one_host_the_engines_read_the_file_of_the_gateway_that_follows(monkeypatch):
    with gateways(2) as fleet:
        for door in fleet.doors:
            never_sends(door, monkeypatch)
        assert statuses(upload(fleet.follower, "here", weights(8))) == {"replica-0": "done", "replica-1": "done"}
