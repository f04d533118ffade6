"""A request with retain_s that is sent again goes to the replica that has its tokens."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.errors import AttachedElsewhere, ReplicaMisfit
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.launcher import Placement
from fastdeploy.fleet.replica import Replica, ReplicaEvent
from fastdeploy.inter_communicator import messages as m
from fleet.played_fleet import Fleet, in_loop, request

ADD = request(retain_s=60.0, fingerprint="f")


async def submit(fleet: Fleet, holder: int, kept_s: float | None = None) -> asyncio.Future[RequestStream]:
    """Send ADD. Of the engines that are asked, the one with the number ``holder`` knows it."""
    submitting = asyncio.ensure_future(fleet.client.submit(ADD))
    await asyncio.sleep(0)
    for i, engine in enumerate(fleet.engines):
        engine.reply(engine.of(m.Call)[-1], known=i == holder, kept_s=kept_s)
    return submitting


@in_loop
async def test_a_repeat_goes_to_the_replica_that_has_the_result(fleet):
    stream = await (await submit(fleet, 1))
    assert [len(engine.of(AddRequest)) for engine in fleet.engines] == [0, 1]
    repeat = asyncio.ensure_future(fleet.client.submit(ADD))
    await asyncio.sleep(0)
    *_, fence = fleet.engines[1].of(m.Call)  # behind it no output of the first stream comes
    fleet.engines[1].reply(fence)
    later = await repeat
    with pytest.raises(AttachedElsewhere):
        stream.read()
    sent = [type(message) for message in fleet.engines[1].sent]
    assert sent == [m.Call, AddRequest, m.CancelRequest, m.Call, AddRequest]
    later.close()


@pytest.mark.parametrize("kept_s", [(None, 5.0), (6.0, 5.0)], ids=["one has the rest", "one was computed again"])
def test_a_repeat_goes_to_the_replica_whose_tokens_a_client_has_got_last(kept_s):
    async def run() -> None:
        fleet = Fleet()
        submitting = asyncio.ensure_future(fleet.client.submit(ADD))
        await asyncio.sleep(0)
        for engine, seconds in zip(fleet.engines, kept_s, strict=True):
            engine.reply(engine.of(m.Call)[0], known=True, kept_s=seconds)
        await submitting
        assert [len(engine.of(AddRequest)) for engine in fleet.engines] == [0, 1]

    asyncio.run(run())


@in_loop
async def test_a_repeat_waits_for_the_replica_with_the_result_while_it_joins_the_next_leader(fleet):
    fleet.replicas[1].advance(ReplicaEvent.DEPOSED)
    submitting = await submit(fleet, 1, kept_s=1.0)
    await asyncio.sleep(0.05)
    assert not submitting.done() and not any(engine.of(AddRequest) for engine in fleet.engines)
    fleet.replicas[1].advance(ReplicaEvent.JOINED)
    await submitting
    assert [len(engine.of(AddRequest)) for engine in fleet.engines] == [0, 1]


@in_loop
async def test_a_repeat_is_computed_again_once_the_replica_with_the_result_cannot_join(fleet):
    async def misfit(replica: Replica) -> None:
        raise ReplicaMisfit("it has another model", param="vocab_size")

    fleet.replicas[1].advance(ReplicaEvent.DEPOSED)
    submitting = await submit(fleet, 1, kept_s=1.0)
    await asyncio.sleep(0.05)
    assert not submitting.done()
    joins = fleet.client.membership.joins
    del joins.begin  # the real one
    joins._joiner.bring = misfit
    joins.begin(fleet.replicas[1])
    await asyncio.wait_for(submitting, 10.0)  # failover_s is longer
    assert [len(engine.of(AddRequest)) for engine in fleet.engines] == [1, 0]
    joins.end_all()


@in_loop
async def test_a_repeat_asks_all_replicas_after_the_loss_of_the_one_that_had_the_result(fleet):
    (await (await submit(fleet, 0))).close()
    engine = fleet.replicas[0].client
    engine.welcome = replace(engine.welcome, boot_id="of another engine, which another gateway has not asked")
    await (await submit(fleet, 1))
    assert [len(engine.of(AddRequest)) for engine in fleet.engines] == [1, 1]


@in_loop
async def test_a_gateway_that_starts_asks_when_it_is_connected_to_all_replicas(fleet):
    late = Replica(Placement("late", "", "", "here"), None, 1.0, fleet.client.membership._replica_changed)
    fleet.client.membership.replicas[late.name] = late
    asking = asyncio.ensure_future(fleet.client.submit(ADD))
    await asyncio.sleep(0.05)
    assert not any(engine.of(m.Call) for engine in fleet.engines)
    late.advance(ReplicaEvent.CONNECTED)
    await asyncio.sleep(0.05)
    assert all(engine.of(m.Call) for engine in fleet.engines)
    asking.cancel()
