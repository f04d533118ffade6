"""The states of a replica, and the way out of the fleet of one that is lost or fenced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from e2e.server import until
from fastdeploy.client.request_stream import joined
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.fleet.replica import TRANSITIONS, Replica, ReplicaEvent, ReplicaState
from fastdeploy.inter_communicator.messages import PauseStatusArgs, Welcome
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from fleet.fake_fleet import FakeFleet, fake_fleet

BODY = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeFleet]:
    config = FleetConfig(fleet_id="fleet-1", stall_s=1.0, rebuild_s=1.0, lease_s=0.6)
    with fake_fleet(2, restarts=True, config=config, heartbeat_s=0.05) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: FakeFleet) -> FakeFleet:
    """Two members, without holds."""
    shared.wait_members(2)
    shared.launcher.restarts.clear()
    shared.http.post("/v1/resume", json={"hold_id": "trainer"})
    return shared


def new_replica() -> Replica:
    placement = Placement("r", "ipc:///nowhere", "http://r", "here")
    return Replica(placement, ZmqConnector(placement.endpoint), 1.0, lambda replica: None)


def test_every_event_that_is_not_listed_raises():
    for state, event in itertools.product(ReplicaState, ReplicaEvent):
        replica = new_replica()
        replica.state = state
        if (state, event) in TRANSITIONS:
            replica.advance(event)
            assert replica.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(KeyError):
                replica.advance(event)
            assert replica.state is state


def test_a_replica_becomes_a_member_by_a_join_only():
    assert {key for key, state in TRANSITIONS.items() if state is ReplicaState.MEMBER} == {
        (ReplicaState.JOINING, ReplicaEvent.JOINED),
        (ReplicaState.DRAINING, ReplicaEvent.UNDRAIN),
    }


def test_nothing_leaves_the_state_removed():
    assert not [key for key in TRANSITIONS if key[0] is ReplicaState.REMOVED]


def test_a_late_event_of_an_old_connection_does_not_reach_the_replica():
    replica = new_replica()
    old = replica.client
    old.model_info, old.welcome = {"max_num_seqs": 8, "max_waiting": 4}, Welcome("boot", 0, 64)
    old._on_connected()
    assert replica.state is ReplicaState.JOINING
    replica.advance(ReplicaEvent.FENCE, "a test")
    replica.cut("a test")
    old._on_connected()
    assert replica.state is ReplicaState.FENCED


def test_a_fenced_replica_is_restarted_and_joins_again(fleet):
    replica = fleet.replica("replica-0")
    boot_id = fleet.engines[0].engine.boot_id
    states = []

    def fence() -> None:
        fleet.client.membership.fence(replica, "a test fences it")
        states.append(replica.state)
        fleet.client.membership.fence(replica, "once is enough")

    fleet.loop.call_soon_threadsafe(fence)
    until(lambda: fleet.launcher.restarts, 20, "restarted")
    until(lambda: replica.state is ReplicaState.MEMBER, 20, "joined again")
    assert states == [ReplicaState.FENCED]
    assert fleet.launcher.restarts == [("replica-0", "a test fences it")]
    assert replica.client.welcome.boot_id == fleet.engines[0].engine.boot_id != boot_id


def test_an_answer_to_a_question_from_before_a_change_fences_nobody(fleet):
    replica, membership = fleet.replica("replica-0"), fleet.client.membership

    async def hear(age: int) -> ReplicaState:
        """Let the replica answer with another epoch, to a question that is ``age`` revisions old."""
        replica.weight_epoch = membership.state.weight_epoch + 1
        membership._renewed(replica, membership.state.revision - age)
        replica.weight_epoch = membership.state.weight_epoch
        return replica.state

    assert fleet.run(hear(1)) is ReplicaState.MEMBER
    assert fleet.run(hear(0)) is ReplicaState.FENCED


def test_a_replica_that_shall_drain_gets_no_request_after_its_restart(fleet):
    replica, membership = fleet.replica("replica-0"), fleet.client.membership
    fleet.run(membership.drain("replica-0"))
    fleet.loop.call_soon_threadsafe(membership.fence, replica, "a test fences it")
    until(lambda: fleet.launcher.restarts, 20, "restarted")
    fleet.wait_members(2)
    assert replica.state is ReplicaState.DRAINING
    fleet.loop.call_soon_threadsafe(membership.undrain, "replica-0")
    until(lambda: replica.state is ReplicaState.MEMBER, 20, "it takes requests again")


def test_a_session_ends_with_the_term_of_its_gateway(fleet):
    assert fleet.http.post("/v1/weights/begin", json={}).status_code == 200
    membership = fleet.client.membership

    async def step_down() -> tuple[int, int]:
        before = membership.state.changing
        membership.leadership.depose("a test deposes it")
        return before, membership.state.changing

    assert fleet.run(step_down()) == (1, 0), "nobody could join in its next term"


def test_what_is_open_fails_after_the_state_of_a_fenced_replica_has_changed(fleet):
    replica, seen = fleet.replica("replica-0"), []

    async def fence() -> None:
        call = replica.client.post(PauseStatusArgs())
        call.add_done_callback(lambda future: seen.append((replica.state, type(future.exception()))))
        fleet.client.membership.fence(replica, "a test fences it")

    fleet.engines[0].stop()
    fleet.run(fence())
    until(lambda: seen, 20, "the call has failed")
    assert seen == [(ReplicaState.FENCED, EngineDead)]


@pytest.mark.slow
def test_a_stopped_replica_delivers_nothing_when_it_goes_on():
    config = FleetConfig(fleet_id="fleet-1", stall_s=0.5, rebuild_s=0.2)
    with fake_fleet(2, config=config, heartbeat_s=0.05, runner={"step_s": 0.01}) as fleet:
        replica, engine = fleet.replica("replica-0"), fleet.engines[0]
        request = AddRequest("r", [1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
        stream = fleet.run(replica.client.submit(request))
        until(lambda: stream._outputs, 20, "a token has come")
        engine.stop()
        until(lambda: replica.state is ReplicaState.FENCED, 20, "the silent engine is cut off")
        tokens = len(joined(stream._outputs[0])[0].token_ids)
        engine.go_on()
        until(lambda: replica.state is ReplicaState.MEMBER, 20, "joined again")
        assert len(joined(stream._outputs[0])[0].token_ids) == tokens
        assert isinstance(stream._error, EngineDead)
        until(lambda: not len(engine.engine.lifecycle.requests), 20, "the engine has ended the request")


def test_a_silent_replica_is_restarted(fleet):
    before = fleet.engines[0].engine.boot_id
    fleet.engines[0].stop()
    until(lambda: fleet.launcher.restarts, 20, "restarted")
    until(lambda: fleet.replica("replica-0").state is ReplicaState.MEMBER, 20, "joined again")
    assert fleet.engines[0].engine.boot_id != before
    name, why = fleet.launcher.restarts[0]
    assert name == "replica-0" and "silent" in why


def test_a_changed_endpoint_is_followed(fleet):
    replica = fleet.replica("replica-0")
    fleet.engines[0].move()
    fleet.launcher.tell()
    until(lambda: replica.placement.endpoint == fleet.engines[0].endpoint, 20, "the new endpoint")
    until(lambda: replica.state is ReplicaState.MEMBER, 20, "joined at the new endpoint")
    assert replica.client.welcome.boot_id == fleet.engines[0].engine.boot_id
    assert not fleet.launcher.restarts


def test_a_jump_of_the_wall_clock_changes_nothing(fleet, monkeypatch):
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86400.0)
    term = fleet.client.membership.leadership.term
    for i in range(4):
        body = BODY | {"prompt": [i, 2], "max_tokens": 4}
        assert fleet.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    monkeypatch.setattr(time, "time", lambda: now() - 86400.0)
    assert fleet.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
    assert fleet.http.post("/v1/resume").status_code == 200
    assert [replica.state for replica in fleet.client.membership.quorum] == [ReplicaState.MEMBER] * 2
    assert (fleet.client.membership.leadership.term, fleet.launcher.restarts) == (term, [])


def test_the_description_has_state_load_and_holds_of_each_replica(fleet):
    assert fleet.http.post("/v1/pause", json={"mode": "keep", "hold_id": "trainer"}).status_code == 200
    membership = fleet.client.membership
    replicas = membership.replicas.values()
    until(lambda: all(replica.describe()["holds"] for replica in replicas), 20, "the lease was renewed")
    for i, entry in enumerate([replica.describe() for replica in replicas]):
        assert (entry["name"], entry["state"], entry["weight_epoch"]) == (f"replica-{i}", "member", 0)
        assert entry["load"]["available_gpu_block_num"] > 0
        assert [hold["id"] for hold in entry["holds"]] == ["trainer"]
