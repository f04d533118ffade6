"""A rolling change: the gateway that leads replaces one replica after the other, and goes back if one does not work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from e2e.server import in_background, until
from fastdeploy.fleet import roll as roll_module
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, Roll, RollPhase
from fastdeploy.fleet.roll import RollingChange
from fleet.fake_fleet import FakeFleet, ThreadLauncher
from support.fake_runner import expected_tokens

CONFIG = FleetConfig(fleet_id="fleet-1", lease_s=2.0, rebuild_s=0.3)
RUNNER = {"step_s": 0.01, "num_blocks": 256}
BODY = {"ignore_eos": True, "return_token_ids": True}


class RollingLauncher(ThreadLauncher):
    """Its parent does what entrypoints/fleet.py does. log: what the gateway asked for."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.numbers: dict[str, int] = {}
        self.log: list[tuple[str, ...]] = []

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        async for placements in super().placements():
            yield [msgspec.structs.replace(one, settings=self.numbers.get(one.name, 0)) for one in placements]

    async def begin_roll(self, given: dict[str, str], drain_s: float) -> Roll:
        self.roll = Roll(1, RollPhase.REPLICAS, given, drain_s)
        return self.roll

    async def replace(self, name: str) -> None:
        self.log.append(("replace", name))
        self.numbers[name] = self.roll.settings
        self.tell()
        await asyncio.to_thread(self.revive, name)

    async def go_back(self, name: str, why: str) -> None:
        self.log.append(("go_back", name))
        self.roll = msgspec.structs.replace(self.roll, settings=0, why=why)

    async def replicas_replaced(self) -> None:
        self.log.append(("done",))
        self.roll = msgspec.structs.replace(self.roll, phase=RollPhase.DONE)


@pytest.fixture
def fleet(monkeypatch) -> Iterator[FakeFleet]:
    monkeypatch.setattr(roll_module, "LOOK_S", 0.02)
    monkeypatch.setattr(roll_module, "BLOCKED_S", 0.1)
    monkeypatch.setattr("fleet.fake_fleet.ThreadLauncher", RollingLauncher)
    fleet = FakeFleet(3, config=CONFIG, restarts=True, runner=RUNNER)
    try:
        yield fleet
    finally:
        fleet.close()


def begin(fleet: FakeFleet, drain_s: float = 0.1) -> None:
    reply = fleet.http.post("/v1/replicas/roll", json={"settings": {"max-num-seqs": "5"}, "drain_s": drain_s})
    assert reply.json()["result"]["given"] == {"max_num_seqs": "5"}


def phase(fleet: FakeFleet) -> str:
    return fleet.http.get("/v1/replicas").json()["roll"]["phase"]


def ask(fleet: FakeFleet, i: int, num: int) -> list[int]:
    reply = fleet.http.post("/v1/completions", json=BODY | {"prompt": [i], "max_tokens": num})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def test_each_replica_is_replaced_in_turn_and_its_requests_go_on(fleet):
    replies = [in_background(ask, fleet, i, 100) for i in range(6)]
    until(lambda: sum(r.in_flight for r in fleet.client.membership.replicas.values()) == 6, 20, "all run")
    begin(fleet)
    until(lambda: phase(fleet) == "done", 60, "the end of the change")
    names = [f"replica-{i}" for i in range(3)]
    assert fleet.launcher.log == [*(("replace", name) for name in names), ("done",)]
    assert [reply.result(60) for reply in replies] == [expected_tokens([i], 100) for i in range(6)]
    entries = fleet.http.get("/v1/replicas").json()["replicas"]
    assert [(entry["state"], entry["settings"]) for entry in entries] == [("member", 1)] * 3


@pytest.fixture
def look(monkeypatch) -> Callable[[], None]:
    """Return a function that returns after the gateway has looked at the replicas again."""
    num_looks = 0
    go_on = RollingChange._go_on

    async def counted(self: RollingChange, roll: Roll) -> None:
        nonlocal num_looks
        await go_on(self, roll)
        num_looks += 1

    def look() -> None:
        before = num_looks
        until(lambda: num_looks > before + 1, 20, "two looks")

    monkeypatch.setattr(RollingChange, "_go_on", counted)
    return look


def test_nobody_is_replaced_while_another_replica_is_away_or_a_weight_session_is_open(fleet, look):
    session = fleet.http.post("/v1/weights/begin", json={"version": "w1"}).json()["result"]["session_id"]
    begin(fleet)
    look()
    assert fleet.launcher.log == [], "a session is open"
    fleet.engines[2].kill()
    until(lambda: not fleet.replica("replica-2").in_quorum, 20, "the loss was noticed")
    fleet.launcher.numbers["replica-2"] = 1  # it comes back with the new settings
    fleet.launcher.tell()
    until(lambda: fleet.replica("replica-2").placement.settings == 1, 20, "its placement")
    assert fleet.http.post("/v1/weights/abort", json={"session_id": session}).status_code == 200
    look()
    assert fleet.launcher.log == [], "a replica is away"
    fleet.launcher.revive("replica-2")
    until(lambda: phase(fleet) == "done", 60, "the end of the change")
    assert fleet.launcher.log == [("replace", "replica-0"), ("replace", "replica-1"), ("done",)]


def test_nobody_is_replaced_while_the_weights_sleep_since_no_member_could_give_them(fleet, look):
    assert fleet.http.post("/v1/sleep", json={"tags": ["weight"]}).status_code == 200
    begin(fleet)
    look()
    assert fleet.launcher.log == []
    assert fleet.http.post("/v1/wakeup").status_code == 200
    until(lambda: fleet.launcher.log, 20, "it goes on")


def test_a_replica_that_cannot_join_lets_the_change_go_back(fleet):
    revive = fleet.launcher.revive

    def with_another_model(name: str) -> None:
        is_new = fleet.launcher.numbers[name] == 1 and name == "replica-1"
        fleet.launcher.find(name)._runner_options = RUNNER | ({"vocab": 999} if is_new else {})
        revive(name)

    fleet.launcher.revive = with_another_model
    begin(fleet)
    until(lambda: phase(fleet) == "done", 60, "the end of the change")
    replaced = [("replace", "replica-0"), ("replace", "replica-1"), ("go_back", "replica-1")]
    again = [("replace", "replica-1"), ("replace", "replica-0"), ("done",)]
    assert fleet.launcher.log == replaced + again, "the one that serves nothing is replaced first"
    assert "its vocab_size is 999" in fleet.http.get("/v1/replicas").json()["roll"]["why"]
    assert ask(fleet, 1, 5) == expected_tokens([1], 5)
