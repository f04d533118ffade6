"""The replica of a request."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet import router as module
from fastdeploy.fleet.launcher import Placement
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.fleet.router import CHOICE_TOKENS, GROUP_CHOICES, MOVE_FACTOR, Router, Wanted
from fastdeploy.inter_communicator.transport import Connector


def make_replica(name: str) -> Replica:
    replica = Replica(Placement(name, "", "", "here"), cast(Connector, None), 1.0, lambda replica: None)
    replica.state, replica.slots = ReplicaState.MEMBER, 64
    return replica


@pytest.fixture
def replicas() -> list[Replica]:
    return [make_replica(f"r{i}") for i in range(4)]


def make_request(length: int = 1000, first: int = 1, **fields: Any) -> AddRequest:
    return AddRequest("x", [first] * length, SamplingParams(seed=1), **fields)


def place(router: Router, request: AddRequest, replicas: list[Replica], **options: Any) -> str | None:
    route = router.pick(Wanted.by(request), replicas, **options)
    if route is None:
        return None
    route.began(request.n)
    return route.replica.name


def test_requests_of_no_session_are_spread_by_the_work_that_runs(replicas):
    router = Router()
    names = [place(router, make_request(first=i), replicas) for i in range(8)]
    assert sorted(names) == ["r0", "r0", "r1", "r1", "r2", "r2", "r3", "r3"]
    replicas[0].load += 10_000
    replicas[3].load += 10_000
    assert {place(router, make_request(first=20 + i), replicas) for i in range(4)} == {"r1", "r2"}


def test_a_session_returns_to_its_replica_though_others_are_idle(replicas):
    router = Router()
    first = place(router, make_request(session="s"), replicas)
    assert place(router, make_request(1200, session="s"), replicas) == first
    assert place(router, make_request(1500, session="s"), replicas) == first
    assert place(router, make_request(first=2, session="other"), replicas) != first


def test_a_session_moves_when_the_wait_is_clearly_longer_than_its_prefix(replicas):
    router = Router()
    router.pick(Wanted.by(make_request(1000, session="s")), replicas)
    replicas[0].load = int(MOVE_FACTOR * 1000)
    assert place(router, make_request(1100, session="s"), replicas) == "r0"
    router.pick(Wanted.by(make_request(1000, first=2, session="t")), replicas)
    replicas[0].load = int(MOVE_FACTOR * 1100) + 1
    for replica in replicas[1:]:
        replica.load = 0
    assert place(router, make_request(1200, session="s"), replicas) == "r1"
    assert place(router, make_request(1300, session="s"), replicas) == "r1", "the new replica has the prefix now"


def test_choices_above_the_batch_count_as_a_queue(replicas):
    router = Router()
    router.pick(Wanted.by(make_request(1000, session="s")), replicas)
    replicas[0].in_flight = replicas[0].slots
    assert place(router, make_request(1000, session="s"), replicas) == "r0"
    replicas[0].in_flight = replicas[0].slots + 10
    assert place(router, make_request(1000, session="s"), replicas) == "r1"


def test_a_replica_that_has_lost_its_prefixes_keeps_no_session(replicas):
    router = Router()
    router.pick(Wanted.by(make_request(1000, session="s")), replicas)
    for _ in range(40):
        route = router.pick(Wanted.by(make_request(1000, session="s")), replicas)
        route.began(1)
        route.started(cached_tokens=0)
        route.closed()
    assert replicas[0].trust < 0.05
    replicas[0].load = 200
    assert place(router, make_request(1000, session="s"), replicas) == "r1"


def test_equal_prompts_and_the_members_of_a_group_stay_together(replicas):
    router = Router()
    together = {place(router, make_request(10), replicas) for _ in range(GROUP_CHOICES)}
    assert len(together) == 1
    assert place(router, make_request(10, first=2, group="g"), replicas) not in together
    others = {place(router, make_request(10, first=i, group="g"), replicas) for i in range(3, 10)}
    assert len(others) == 1
    many = [place(router, make_request(10), replicas) for _ in range(8 * GROUP_CHOICES)]
    assert set(many) == {"r0", "r1", "r2", "r3"}, "a group that is too large for one replica is spread"


def test_the_first_requests_of_sessions_with_one_prompt_stay_together(replicas):
    router = Router()
    samples = {place(router, make_request(4000, session=f"s{i}"), replicas) for i in range(4)}
    assert len(samples) == 1
    assert place(router, make_request(4000, first=2, session="other"), replicas) not in samples
    home = samples.pop()
    assert place(router, make_request(4100, first=3, session="s0"), replicas) == home, "then a session has its own home"


def test_every_request_of_a_session_has_the_place_in_the_queue_of_the_first(replicas):
    router = Router()
    old = router.seen(make_request(session="old")).began
    assert 0 < old <= router.seen(make_request(session="young")).began
    assert router.seen(make_request(5000, session="old")).began == old
    assert router.seen(make_request()).began == 0


def test_no_replica_with_older_weights_than_the_client_has_seen(replicas):
    router = Router()
    assert place(router, make_request(), replicas, epoch=1) is None
    replicas[2].weight_epoch = 3
    assert place(router, make_request(), replicas, epoch=3) == "r2"
    assert place(router, make_request(), replicas, epoch=3, refused_by={"r2"}) is None


def test_the_home_of_a_session_that_drains_or_is_lost_gets_nothing_new(replicas):
    router = Router()
    router.pick(Wanted.by(make_request(session="s")), replicas)
    for state in (ReplicaState.DRAINING, ReplicaState.FENCED, ReplicaState.JOINING):
        replicas[0].state = state
        assert place(router, make_request(session="s"), [r for r in replicas if r is not replicas[0]]) != "r0"


def test_a_member_that_is_remembered_gets_nothing_while_the_gateway_may_not_send(replicas):
    router = Router()
    assert place(router, make_request(session="s"), replicas) == "r0"
    assert place(router, make_request(session="s"), []) is None
    assert place(router, make_request(), []) is None


def test_old_sessions_are_forgotten(replicas):
    router = Router(max_sessions=2)
    for name in "abc":
        router.seen(make_request(session=name)).epoch = 5
    assert router.seen(make_request(session="c")).epoch == 5
    assert router.seen(make_request(session="a")).epoch == 0
    assert len(router._sessions) == 2


def test_all_work_is_taken_off_a_replica_when_it_has_ended(replicas):
    router = Router()
    route = router.pick(Wanted.by(make_request(n=3)), replicas)
    route.began(3)
    assert replicas[0].in_flight == 3 and replicas[0].load > 1000 + 3 * CHOICE_TOKENS
    route.started(cached_tokens=0)
    route.ended()
    assert replicas[0].in_flight == 2 and replicas[0].load >= 2 * CHOICE_TOKENS
    route.closed()
    route.closed()
    assert replicas[0].in_flight == replicas[0].load == 0


def test_the_home_is_kept_without_a_look_at_the_others(replicas, monkeypatch):
    router = Router()
    router.pick(Wanted.by(make_request(session="s")), replicas)
    monkeypatch.setattr(module, "_least_loaded", None)
    assert place(router, make_request(session="s"), replicas) == "r0"
