"""A fleet with two gateways behind one port: each one serves, makes control calls, and may die alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_server import FleetServer
from e2e.server import PROMPT, SMALL, LiveStream, Reply, until
from fastdeploy.core.process import is_alive

NUM = 2
FLAGS = ("--gateways", str(NUM), *SMALL)
LONG = 800  # tokens of a stream that runs while a process is killed
ESTABLISHED = "01"  # in /proc/net/tcp


class Door:
    """A client with one connection, which leads to one gateway. pid: the process of this gateway."""

    def __init__(self, fleet: FleetServer):
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        self.http = httpx.Client(base_url=fleet.url, timeout=90, limits=limits)
        with self.http.stream("GET", "/health") as reply:
            port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
            self.pid = holder(fleet, port)
            reply.read()

    def call(self, method: str, path: str, body: Any = None) -> Reply:
        return Reply(self.http.request(method, path, json=body))


def holder(fleet: FleetServer, client_port: int) -> int:
    """Return the gateway that has the connection of this client."""
    ends = f":{fleet.port:04X}", f":{client_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # The kernel may show a row twice while others come and go, and the end of an earlier connection with these ports.
    [inode] = {row[9] for row in rows if (row[1][-5:], row[2][-5:]) == ends and row[3] == ESTABLISHED}
    link = f"socket:[{inode}]"
    return next(pid for pid in fleet.gateway_pids if link in map(target, Path(f"/proc/{pid}/fd").iterdir()))


def target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""


def doors_of(fleet: FleetServer) -> dict[int, Door]:
    """Return a door to each gateway, by its process. Waits for a gateway that has just been started."""
    doors: dict[int, Door] = {}

    def found_all() -> bool:
        door = Door(fleet)
        if doors.setdefault(door.pid, door) is not door:
            door.http.close()
        return len(doors) == NUM

    until(found_all, 60, "connections went to every gateway")
    return doors


def leader_of(fleet: FleetServer) -> int:
    """Return the gateway that leads: the last one that said so."""
    lines = [line for line in fleet.log_path.read_text().splitlines() if "fleet.leader: leading fleet" in line]
    return int(lines[-1].partition("[")[2].partition("]")[0])


@pytest.fixture(scope="module")
def shared() -> Iterator[FleetServer]:
    with FleetServer(2, *FLAGS) as fleet:
        yield fleet
        assert fleet.stop() == 0, fleet.log()
        assert fleet.leftovers() == []


@pytest.fixture
def fleet(shared: FleetServer) -> Iterator[FleetServer]:
    """Return the shared fleet. It has all its gateways and members again after the test."""
    yield shared
    until(lambda: len(shared.gateway_pids) == NUM, 30, "every gateway runs")
    doors_of(shared)
    shared.wait_members(2)


def test_every_gateway_serves_and_one_scrape_counts_what_all_have_answered(fleet):
    doors, path = doors_of(fleet), 'http_requests_total{method="POST",path="/v1/completions",status_code="200"}'
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    texts = [door.call("POST", "/v1/completions", body).ok()["choices"][0]["token_ids"] for door in doors.values()]
    assert len(texts) == NUM and texts[0] == texts[1]
    for door in doors.values():
        assert f"{path} 2.0" in door.call("GET", "/metrics").body.decode()
        assert door.call("GET", "/ready").status == 200
        assert {r["state"] for r in door.call("GET", "/v1/replicas").ok()["replicas"]} == {"member"}


def test_a_control_call_through_any_gateway_is_on_all_replicas_and_shown_by_all_gateways(fleet):
    doors = doors_of(fleet)
    for i, (asked, other) in enumerate([list(doors.values()), list(doors.values())[::-1]]):
        hold = {"hold_id": f"trainer-{i}"}
        report = asked.call("POST", "/v1/pause", {"mode": "keep", **hold}).result
        assert report["is_paused"] and [entry["status"] for entry in report["replicas"]] == ["done"] * 2
        assert [held["id"] for held in other.call("GET", "/v1/is_paused").result["holds"]] == [hold["hold_id"]]
        assert all(fleet.ask(name, "/v1/is_paused")["is_paused"] for name in fleet.replicas())
        assert other.call("POST", "/v1/resume", hold).result["released"] == [hold["hold_id"]]
        refused = asked.call("POST", "/v1/update_weights", {"model_path": "/nowhere"})
        assert (refused.status, refused.json["error"]["code"]) == (400, "weight_update_refused")


def test_a_session_that_began_at_one_gateway_goes_on_at_another(fleet):
    body = {"messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 4}
    for number, door in enumerate(doors_of(fleet).values(), 1):
        turn = door.call("POST", "/sessions/agent/v1/chat/completions", body).ok()
        said = turn["choices"][0]["message"]
        body["messages"] += [said, {"role": "user", "content": "and then?"}]
        assert door.call("GET", "/v1/sessions/agent").json["num_turns"] == number


class Requests(threading.Thread):
    """Sends short requests, each over a new connection. ``slowest_s``: how long the slowest one took until its answer
    was there, a first one that failed included, which is sent again at once. failures: why some failed."""

    def __init__(self, fleet: FleetServer):
        super().__init__(daemon=True)
        self._fleet, self._stopped = fleet, threading.Event()
        self.num, self.slowest_s, self.failures = 0, 0.0, list[str]()
        self.start()

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True}
        began = time.monotonic()
        while not self._stopped.is_set():
            try:
                reply = self._fleet.post("/v1/completions", body)
            except httpx.TransportError as error:  # it was accepted by the gateway that died
                self.failures.append(repr(error))
                continue
            if reply.status != 200:
                self.failures.append(str(reply.body))
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.num, began = self.num + 1, time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        self.join(90)


@pytest.mark.parametrize("role", ["leads", pytest.param("follows", marks=pytest.mark.slow)])
def test_streams_through_other_gateways_do_not_notice_the_death_of_one(fleet, role):
    doors, leader = doors_of(fleet), leader_of(fleet)
    dies = leader if role == "leads" else next(pid for pid in doors if pid != leader)
    [lives] = doors.keys() - {dies}
    undisturbed = fleet.complete(PROMPT, max_tokens=LONG, ignore_eos=True)["token_ids"]
    requests = Requests(fleet)
    try:
        stream = LiveStream(doors[lives], PROMPT, max_tokens=LONG).wait_for_tokens(1)
        os.kill(dies, signal.SIGKILL)
        report = doors[lives].call("POST", "/v1/pause", {"mode": "keep", "hold_id": role}).result
        assert report["is_paused"] and len(report["replicas"]) == 2
        assert doors[lives].call("POST", "/v1/resume", {"hold_id": role}).result["released"] == [role]
        stream.wait_end(60)
        until(lambda: len(fleet.gateway_pids) == NUM, 60, "another one was started")
        doors_of(fleet)
    finally:
        requests.stop()
    print(f"{role}: {requests.num} requests, the slowest {requests.slowest_s:.2f} s, failed {requests.failures}")
    assert (stream.error, stream.finals, stream.tokens) == (None, ["length"], undisturbed)
    # At most the one request that the gateway had when it died, since they are sent one after the other.
    assert requests.num > 0 and len(requests.failures) <= 1 and not is_alive(dies)


def in_flight(url: str) -> int:
    """Return how many choices run at a replica, as its own API server says."""
    return httpx.get(f"{url}/v1/replicas").json()["replicas"][0]["in_flight"]


@pytest.mark.slow
def test_a_stream_whose_gateway_and_engine_die_has_the_same_tokens_at_another_gateway_without_a_seed(fleet):
    doors = doors_of(fleet)
    dies, lives = doors
    params = {"max_tokens": LONG, "temperature": 1, "request_id": "taken-up", "retain_s": 60}
    stream = LiveStream(doors[dies], PROMPT, **params).wait_for_tokens(20)
    [runs] = [name for name, entry in fleet.replicas().items() if in_flight(entry["url"])]
    os.kill(dies, signal.SIGKILL)
    engine = fleet.engine_of(runs)
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    stream.wait_end()
    before = stream.tokens
    assert stream.error is not None and len(before) < LONG, "it ran when both died"
    until(lambda: not is_alive(engine), 20, "the engine has died")
    again = LiveStream(doors[lives], PROMPT, **params).wait_end(90)
    assert (again.error, again.finals, len(again.tokens)) == (None, ["length"], LONG)
    assert again.tokens[: len(before)] == before and len(set(before)) > 1


@pytest.mark.slow
def test_a_gateway_that_is_stopped_gets_no_new_connections_and_is_replaced():
    with FleetServer(2, *FLAGS, "--stall-s", "3") as fleet:
        doors, leader = doors_of(fleet), leader_of(fleet)
        os.kill(leader, signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: "killing gateway" in fleet.log(), 60, "it is killed")
        print(f"killed after {time.monotonic() - began:.1f} s")
        [lives] = doors.keys() - {leader}
        report = doors[lives].call("POST", "/v1/pause", {"mode": "keep", "hold_id": "late"}).result
        assert report["is_paused"]
        until(lambda: len(doors_of(fleet)) == NUM and leader not in fleet.gateway_pids, 60, "another one was started")
        assert fleet.post("/v1/resume", {"hold_id": "late"}).result["released"] == ["late"]


@pytest.mark.slow
def test_a_stop_ends_the_streams_of_all_gateways_and_leaves_nothing():
    with FleetServer(2, *FLAGS) as fleet:
        streams = [LiveStream(door, PROMPT, max_tokens=3900).wait_for_tokens(1) for door in doors_of(fleet).values()]
        pids = fleet.pids("fastdeploy.entrypoints")
        assert len(pids) == NUM + 1 + 2 * 3, (
            "the parent, the gateways, and an engine and an API server for each replica"
        )
        assert fleet.stop(signal.SIGTERM, timeout_s=20) == 0, fleet.log()
        for one in streams:
            one.wait_end(30)
            assert one.finals == ["abort"] and one.done_seen, (one.finals, one.error)
        assert not [pid for pid in pids if is_alive(pid)] and fleet.leftovers() == []
