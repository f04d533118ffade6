"""The replica of a request, when there are several gateways."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

from e2e.server import until
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet import homes
from fastdeploy.fleet.homes import Homes
from fastdeploy.fleet.replica import TELLS, Replica, ReplicaState
from fastdeploy.fleet.router import MOVE_FACTOR, Router, cost_at
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import FakeGateway, fake_fleet
from fleet.gateways import gateways
from fleet.test_router import make_replica, make_request
from fleet.test_sessions import ask, on_loop, request


def tell(replica: Replica, load: m.Load) -> None:
    """Let the engine tell its load until nothing is left that a gateway only knows of itself."""
    for _ in range(TELLS):
        replica.client._receive(m.Heartbeat(load))


class Doors:
    """Gateways that know each other, and have ``replicas`` replicas each. late: those that do not answer in time. dead:
    those that have no connection. asked: (gateway, question), in their order."""

    def __init__(self, num: int, replicas: int = 4):
        self.names = [f"gateway-{i}" for i in range(num)]
        self.late: set[str] = set()
        self.dead: set[str] = set()
        self.asked: list[tuple[str, m.PlaceArgs]] = []
        self.routers = {name: Router() for name in self.names}
        self.replicas = {name: [make_replica(f"r{i}") for i in range(replicas)] for name in self.names}
        self.homes = {name: self._make(name) for name in self.names}

    def _make(self, name: str) -> Homes:
        return Homes(self.routers[name], lambda: self.replicas[name], name, lambda: self.names, self._ask)

    async def _ask(self, gateway: str, args: m.PlaceArgs) -> dict[str, Any]:
        self.asked.append((gateway, args))
        if gateway in self.dead:
            raise EngineDead("it is dead")
        if gateway in self.late:
            await asyncio.sleep(60)
        return await self.homes[gateway].answer(args)

    async def place(self, gateway: str, add: AddRequest, **options: Any) -> str | None:
        self.routers[gateway].seen(add)
        route = await self.homes[gateway].place(add, options.get("epoch", 0), options.get("refused_by", ()))
        if route is None:
            return None
        if options.get("ends", True):
            for replica in itertools.chain(*self.replicas.values()):
                tell(replica, m.Load())
        else:
            route.began(add.n)
        return route.replica.name

    def home_of(self, add: AddRequest) -> str:
        """Return the gateway that all others ask."""
        asked = {gateway: self.homes[gateway]._home_of(add.session) for gateway in self.names}
        assert len(set(asked.values())) == 1
        return asked[self.names[0]]

    def others(self, gateway: str) -> Sequence[str]:
        return [name for name in self.names if name != gateway]


def test_a_session_stays_on_its_replica_whichever_gateway_it_comes_to():
    async def run() -> None:
        doors, draw, names = Doors(3), random.Random(1), list[tuple[str, int]]()
        for turn in range(4):
            for k in range(12):
                add = make_request(1000 + 100 * turn, first=k, session=f"s{k}")
                names.append((await doors.place(draw.choice(doors.names), add), k))
        replicas = {k: {name for name, session in names if session == k} for k in range(12)}
        assert all(len(of_one) == 1 for of_one in replicas.values())
        assert {gateway for gateway, _ in doors.asked} == set(doors.names), "each is the home of some"

    asyncio.run(run())


def test_the_samples_of_a_prompt_stay_together_whichever_gateways_they_come_to():
    async def run() -> None:
        doors = Doors(3)
        together = {
            await doors.place(doors.names[k % 3], make_request(4000, session=f"s{k}"), ends=False) for k in range(6)
        }
        assert len(together) == 1
        assert {await doors.place(name, make_request(4000), ends=False) for name in doors.names} == together

    asyncio.run(run())


def test_a_gateway_chooses_itself_while_the_home_gives_no_answer():
    async def run() -> None:
        doors = Doors(2)
        add = make_request(session="s")
        home = doors.home_of(add)
        (door,) = doors.others(home)
        first = await doors.place(door, add)
        for broken in (doors.late, doors.dead):
            doors.homes[door]._silent.clear()
            broken.add(home)
            before = len(doors.asked)
            assert [await doors.place(door, make_request(1100, session="s")) for _ in range(3)] == [first] * 3
            assert len(doors.asked) == before + 1, "a home that gives no answer is not asked each time"

    asyncio.run(run())


def test_a_new_home_learns_from_the_gateway_where_the_session_is():
    async def run() -> None:
        doors = Doors(3)
        for k in range(20):
            add = make_request(session=f"s{k}", first=k)
            home = doors.home_of(add)
            door, last = doors.others(home)
            replica = await doors.place(door, add, refused_by=["r0"])
            began = doors.routers[door].began(add.session)
            doors.names.remove(home)
            later = make_request(1500, session=f"s{k}", first=k)
            assert await doors.place(door, later) == replica
            assert await doors.place(last, later) == replica or doors.home_of(later) == door
            assert doors.routers[doors.home_of(later)].began(add.session) == began
            doors.names.append(home)

    asyncio.run(run())


def test_a_replica_that_this_gateway_may_not_use_is_not_taken_from_the_home():
    async def run() -> None:
        doors = Doors(2)
        add = make_request(session="s")
        home = doors.home_of(add)
        (door,) = doors.others(home)
        chosen = await doors.place(door, add)
        there = next(replica for replica in doors.replicas[door] if replica.name == chosen)
        there.state = ReplicaState.DRAINING
        assert await doors.place(door, add) not in (chosen, None)
        there.state = ReplicaState.MEMBER
        assert await doors.place(door, add, refused_by=[chosen]) not in (chosen, None)
        assert await doors.place(door, add, epoch=1) is None

    asyncio.run(run())


def test_a_gateway_that_has_seen_an_old_turn_does_not_make_the_home_forget_the_later_ones():
    async def run() -> None:
        doors = Doors(3)
        add = make_request(1000, session="s")
        home = doors.home_of(add)
        old, last = doors.others(home)
        await doors.place(old, add)
        await doors.place(last, make_request(4000, session="s"))
        route = await doors.homes[old].place(make_request(4100, session="s"), 0, ())
        assert route is not None and route.known == 4000
        assert [args.tokens for _, args in doors.asked] == [0, 0, 1000]

    asyncio.run(run())


def test_all_requests_of_a_session_have_the_place_in_the_queue_of_the_first():
    async def run() -> None:
        doors = Doors(3)
        for name in doors.names:
            await doors.place(name, make_request(session="s"))
        assert len({doors.routers[name].began("s") for name in doors.names}) == 1

    asyncio.run(run())


def test_a_home_counts_what_others_send_until_the_engine_has_told_it():
    async def run() -> None:
        doors = Doors(2, replicas=2)
        requests = [make_request(session=f"s{k}", first=k) for k in range(40)]
        home = doors.names[0]
        own = [add for add in requests if doors.home_of(add) == home][:8]
        names = [await doors.place(doors.names[1], add, ends=False) for add in own]
        assert names.count("r0") == names.count("r1") == 4
        for replica in doors.replicas[home]:
            assert replica.load == 0 < replica.promises.load and replica.promises.choices == 4
            tell(replica, m.Load(choices=4))
        assert {await doors.place(home, add) for add in own} == {"r0", "r1"}
        assert [replica.promises.load for replica in doors.replicas[home]] == [0, 0]

    asyncio.run(run())


def test_a_session_stays_while_only_promises_speak_against_its_replica():
    async def run() -> None:
        doors = Doors(2, replicas=2)
        add = make_request(1000, session="s")
        home = doors.home_of(add)
        (door,) = doors.others(home)
        stays = await doors.place(door, add)
        (replica,) = (r for r in doors.replicas[home] if r.name == stays)
        replica.promises.add(replica.client.num_tells, 4, 20_000)
        assert await doors.place(door, make_request(1100, session="s"), ends=False) == stays
        tell(replica, m.Load(choices=4, prompt_tokens=20_000))
        assert await doors.place(door, make_request(1200, session="s")) != stays

    asyncio.run(run())


def test_a_session_moves_for_the_same_work_in_front_with_one_gateway_and_with_several():
    async def run(num: int, work: int) -> bool:
        doors = Doors(num, replicas=2)
        stays = await doors.place(doors.names[0], make_request(1000, session="s"))
        for replica in itertools.chain(*doors.replicas.values()):
            tell(replica, m.Load(prompt_tokens=work if replica.name == stays else 0))
        return await doors.place(doors.names[0], make_request(1100, session="s")) == stays

    works = int(MOVE_FACTOR * 900), int(MOVE_FACTOR * 1100)  # told by the engines
    assert [[asyncio.run(run(num, work)) for work in works] for num in (1, 2)] == [[True, False], [True, False]]


def test_a_request_that_ends_while_its_home_is_asked_is_not_sent():
    with fake_fleet(1) as fleet:
        asked, answer = asyncio.Event(), asyncio.Event()
        place = fleet.client._homes.place

        async def place_late(*args: Any) -> Any:
            asked.set()
            await answer.wait()
            return await place(*args)

        fleet.client._homes.place = place_late
        output = ask(fleet, request("a"))
        on_loop(fleet, asked.wait()).result(20)
        report = fleet.http.post("/v1/abort_requests", json={"req_ids": ["a"]}).json()["result"]
        assert report["aborted"] == [{"request_id": "a", "output_token_count": 0}]
        fleet.loop.call_soon_threadsafe(answer.set)
        assert output.result(20).message.startswith("Abort before prefill")
        fleet.client._homes.place = place
        assert ask(fleet, request("b")).result(20).finish_reason == "length"
        assert fleet.replica("replica-0").in_flight == 0


async def connected(door: FakeGateway, other: FakeGateway) -> None:
    await door.client.peers.client(other.client.peers.endpoint).connected.wait()


def test_the_prefix_of_a_session_is_cached_for_every_gateway(monkeypatch):
    monkeypatch.setattr(homes, "ASK_S", 20.0)
    runner = {"num_blocks": 1024, "max_model_len": 1024}
    with gateways(2, runner=runner, max_num_batched_tokens=512, heartbeat_s=0.05) as fleet:
        for door, other in itertools.permutations(fleet.doors):
            door.run(connected(door, other))
        cached = []
        replicas = [replica for door in fleet.doors for replica in door.client.membership.replicas.values()]
        for k in range(8):
            for turn, door in enumerate(fleet.doors):
                sampling = {"max_new_tokens": 1, "ignore_eos": True}
                body = {"input_ids": [k + 1] * (400 + turn), "sampling_params": sampling, "session": f"s{k}"}
                reply = door.http.post("/generate", json=body)
                assert reply.status_code == 200, reply.text
                cached.append(reply.json()["meta_info"]["cached_tokens"])
                until(lambda: not any(map(cost_at, replicas)), 20, "all know that nothing runs")
        assert all(tokens >= 396 for tokens in cached[1::2]), cached
