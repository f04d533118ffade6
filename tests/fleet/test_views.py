"""What the gateways of a fleet promise together: the one that leads waits for the others where it must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from e2e.server import until
from fastdeploy.core.errors import WrongOrder
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.endings import EndingCall
from fastdeploy.fleet.follow import Following
from fastdeploy.fleet.replica import ReplicaState
from fastdeploy.fleet.state import FleetState
from fastdeploy.fleet.view import NO_VIEW, EndingView
from fastdeploy.inter_communicator import messages as m
from fleet.fake_fleet import FakeEngine, FakeGateway
from fleet.gateways import QUICK, Gateways, gateways
from support.fake_runner import expected_tokens

BODY = {"ignore_eos": True, "return_token_ids": True, "max_tokens": 5, "prompt": [3, 4]}


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateways]:
    with gateways(2, restarts=True, heartbeat_s=0.05) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: Gateways) -> Gateways:
    for door in shared.doors:
        door.wait_members(2)
        until(lambda door=door: len(door.client.membership.open) == 2, 20, "both are open")
    return shared


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class HeldCalls:
    """Calls of a kind which an engine gets, and handles only after :meth:`release`."""

    def __init__(self, fake: FakeEngine, kind: type[m.Args], holds: Callable[[Any], bool] = lambda args: True):
        self._fake = fake
        self._table = fake.engine._on_call
        self._handle, self._metrics = self._table[kind], self._table[m.MetricsArgs]
        self.calls: list[tuple[Any, ...]] = []

        def hold(args: Any, client: str, answer: Any) -> dict[str, Any] | None:
            if not holds(args):
                return self._handle(args, client, answer)
            self.calls.append((args, client, answer))
            return None

        self._table[kind] = hold
        self._kind = kind

    def release(self) -> None:
        self._table[self._kind] = self._handle

        def handle_all(*args: Any) -> Any:
            for call in self.calls:
                if (result := self._handle(*call)) is not None:
                    call[2](result)
            self._table[m.MetricsArgs] = self._metrics
            return self._metrics(*args)

        self._table[m.MetricsArgs] = handle_all
        self._fake.call(m.MetricsArgs())


def ask(door: FakeGateway, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(door.url + "/v1/completions", json={**BODY, **fields}, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def post(door: FakeGateway, path: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(door.url + path, json=fields, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]


def call(door: FakeGateway, args: m.Args) -> dict[str, Any]:
    return door.run(door.client.call(args))


async def takers_of(door: FakeGateway) -> tuple[list[Any], bool]:
    return door.client._takers(), door.client.membership.leadership.leads


def waits(door: FakeGateway, num: int) -> None:
    until(lambda: door.client.num_waiting == num, 20, f"{num} wait in the gateway")


def epochs(reply: dict[str, Any]) -> list[int]:
    return [span["weight_epoch"] for span in reply["choices"][0]["weight_versions"]]


def test_no_session_sees_new_weights_and_then_old_ones_through_two_gateways(pool):
    config = QUICK.__class__(fleet_id="fleet-1", fence_after_s=20.0, lease_s=20.0)
    with gateways(2, config=config) as fleet:
        late = HeldCalls(fleet.engines[0], m.CommitUpdateArgs, lambda args: not args.prepare)
        update = pool.submit(call, fleet.leader, m.UpdateWeightsArgs(FolderSource("/w1"), version="v1"))
        until(lambda: fleet.epochs() == [0, 1], 20, "one engine has the new weights")
        assert epochs(ask(fleet.leader, session="s")) == [1]
        second = pool.submit(ask, fleet.follower, session="s")
        waits(fleet.follower, 1)
        ask(fleet.follower)  # without a session, it need not wait, whichever engine it comes to
        assert fleet.follower.client.num_waiting == 1
        late.release()
        assert update.result()["weight_epoch"] == 1
        assert epochs(second.result()) == [1]
        assert fleet.epochs() == [1, 1]
        assert {r.weight_epoch for r in fleet.follower.client.membership.quorum} == {1}


def test_a_call_that_fences_a_replica_is_answered_when_no_gateway_has_anything_of_it(fleet):
    leader, follower = fleet.leader, fleet.follower
    post(follower, "/v1/pause", mode="keep", hold_id="trainer")

    def refuse(*args: Any) -> None:
        raise WrongOrder("not now")

    fleet.engines[1].engine._on_call[m.ResumeArgs] = refuse
    with follower.stopped_gateway():
        report = post(leader, "/v1/resume", hold_id="trainer")
        assert {entry["name"]: entry["status"] for entry in report["replicas"]} == {
            "replica-0": "done",
            "replica-1": "fenced",
        }
        assert follower.client.membership.following._valid_until <= leader.loop.time()


def test_a_replica_that_is_fenced_is_cut_off_by_every_gateway_and_its_requests_go_on(pool):
    with gateways(2, runner={"step_s": 0.02}) as fleet:
        follower, replica = fleet.follower, fleet.follower.replica("replica-0")
        streams = [pool.submit(ask, follower, max_tokens=50, prompt=[i, 4]) for i in range(2, 6)]
        until(lambda: replica.in_flight, 20, "something runs there")
        lives = replica.lives
        HeldCalls(fleet.engines[0], m.PauseArgs)
        post(fleet.leader, "/v1/pause", mode="keep", hold_id="trainer")
        assert replica.lives > lives and replica.in_flight == 0
        del fleet.engines[0].engine._on_call[m.PauseArgs]
        fleet.engines[0].restart()
        post(fleet.leader, "/v1/resume", hold_id="trainer")
        for i, stream in enumerate(streams):
            assert stream.result()["choices"][0]["token_ids"] == expected_tokens([i + 2, 4], 50)


def test_an_abort_ends_what_waits_in_another_gateway_and_counts_it(fleet, pool):
    follower = fleet.follower
    for name in ("replica-0", "replica-1"):
        post(follower, "/v1/replicas/drain", name=name)
        assert fleet.leader.replica(name).state is ReplicaState.DRAINING
    waiting = pool.submit(ask, follower, request_id="waits")
    waits(follower, 1)
    report = post(fleet.leader, "/v1/abort_requests", abort_all=True)
    assert [entry["request_id"] for entry in report["aborted"]] == ["waits"]
    assert waiting.result()["choices"][0]["finish_reason"] == "abort"
    for name in ("replica-0", "replica-1"):
        post(fleet.leader, "/v1/replicas/undrain", name=name)
        assert follower.replica(name).state is ReplicaState.MEMBER


def test_a_gateway_that_stood_still_during_an_abort_ends_what_waited_there(fleet, pool):
    follower = fleet.follower
    for name in ("replica-0", "replica-1"):
        post(fleet.leader, "/v1/replicas/drain", name=name)
    waiting = pool.submit(ask, follower)
    waits(follower, 1)
    with follower.stopped_gateway():
        assert post(fleet.leader, "/v1/abort_requests", abort_all=True)["aborted"] == []
    assert waiting.result()["choices"][0]["finish_reason"] == "abort"
    for name in ("replica-0", "replica-1"):
        post(fleet.leader, "/v1/replicas/undrain", name=name)
    assert ask(follower)["choices"][0]["finish_reason"] == "length", "what comes later is not ended"


def test_a_drain_waits_for_the_requests_of_all_gateways(pool):
    with gateways(1, runner={"step_s": 0.02}) as fleet:
        running = pool.submit(ask, fleet.follower, max_tokens=100)
        until(lambda: fleet.follower.replica("replica-0").in_flight, 20, "it runs")
        entry = post(fleet.leader, "/v1/replicas/drain", name="replica-0", timeout_s=0.1)
        assert (entry["state"], entry["in_flight"]) == ("draining", 1)
        entry = post(fleet.leader, "/v1/replicas/drain", name="replica-0")
        assert entry["in_flight"] == 0 and running.result(1)


def test_without_a_valid_view_a_gateway_sends_no_new_request(fleet, pool):
    leader, follower = fleet.leader, fleet.follower
    following = follower.client.membership.following
    prompts = [[3, i] for i in range(4)]  # half of them have their home at the gateway that follows
    for prompt in prompts:
        ask(follower, prompt=prompt)
    with leader.stopped_gateway():
        until(lambda: follower.loop.time() > following._valid_until, 20, "the view has ended")
        takers, leads = follower.run(takers_of(follower))
        assert takers == [] or leads
        requests = [pool.submit(ask, follower, prompt=prompt) for prompt in prompts]
        until(lambda: follower.client.membership.leadership.leads, 20, "it leads")
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result()["choices"][0]["token_ids"] == expected_tokens(prompt, 5)
    until(lambda: not leader.client.membership.leadership.leads, 20, "the other one has stepped down")


def test_a_request_that_is_kept_is_taken_up_at_another_gateway_and_has_a_seed_of_its_name(fleet, pool):
    fields = {"request_id": "kept", "retain_s": 60, "max_tokens": 20}
    assert ask(fleet.leader, **fields)["choices"][0]["token_ids"] == expected_tokens([3, 4], 20)
    assert ask(fleet.follower, **fields)["choices"][0]["token_ids"] == expected_tokens([3, 4], 20)
    seeds = {SamplingParams().seeded("fleet-1/kept").seed, SamplingParams().seeded("fleet-1/kept").seed}
    assert len(seeds) == 1 and SamplingParams().seeded("fleet-1/other").seed not in seeds
    assert SamplingParams(seed=3).seeded("fleet-1/kept").seed == 3
    assert SamplingParams().seeded().seed != SamplingParams().seeded().seed


async def test_a_gateway_that_hears_late_of_an_abort_ends_only_what_came_before_it():
    now, heard = asyncio.get_running_loop().time, []
    nothing = lambda *args: None  # noqa: E731
    abort = m.AbortArgs(abort_all=True)

    def end(args: m.Args, before: float | None) -> EndingCall:
        heard.append((args, before))
        return EndingCall(args)

    for known, calls in ((replace(NO_VIEW, term=1, number=1), 1), (NO_VIEW, 0)):
        following = Following(None, QUICK, {}, FleetState(), nothing, nothing, nothing)
        following.view, following.end_requests = known, end
        late = EndingView(abort, time.time() - 5.0, over=True)
        following._apply(replace(NO_VIEW, term=1, number=2, endings={"late": late}))
        assert len(heard) == calls, "a gateway that had no view has no request from before"
        heard, end_times = [], [before for _, before in heard]
        assert all(before is not None and before < now() - 4.0 for before in end_times)
        following._apply(
            replace(NO_VIEW, term=1, number=3, endings={"late": late, "runs": EndingView(abort, time.time())})
        )
        assert heard == [(abort, None)], "each call is heard once"
        heard = []
