"""The parts of a request, and its outputs from several replicas, on engines that the test plays itself."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.client.request_stream import RequestStream
from fastdeploy.client.resubmission import MAX_VAIN_LOSSES
from fastdeploy.core.errors import (
    DuplicateRequest,
    EngineDead,
    FastDeployError,
    InvalidField,
    QueueFull,
    RequestsRejected,
)
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.replica import ReplicaEvent, ReplicaState
from fastdeploy.http.body import parse_body
from fastdeploy.http.openai.protocol import GenerationBody
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output
from fleet.played_fleet import MAX_WAITING, Fleet, in_loop, request


def taken(stream: RequestStream) -> list[list[int]]:
    return [output.token_ids for output in stream.read()]


@in_loop
async def test_a_request_that_may_end_its_replicas_does_not_end_all_of_them(fleet):
    """The request fails after MAX_VAIN_LOSSES losses in a row without a token. A token begins the count anew."""
    stream = await fleet.client.submit(request())
    for loss in range(MAX_VAIN_LOSSES + 2):
        await fleet.settle()
        at = next(i for i, engine in enumerate(fleet.engines) if engine.of(AddRequest))
        [sent] = fleet.engines[at].of(AddRequest)
        if loss == 2:
            fleet.engines[at].output(sent.request_id, [7])
        assert not stream.ended
        fleet.lose(at)
        fleet.connect(at)
    assert stream.ended and taken(stream) == [[7]]
    with pytest.raises(EngineDead, match="may be what ends them"):
        stream.read()
    await fleet.settle()
    assert not any(engine.of(AddRequest) for engine in fleet.engines)


@in_loop
async def test_outputs_pass_unchanged_and_wake_the_client_s_reader(fleet):
    stream = await fleet.client.submit(request())
    [sent] = fleet.engines[0].of(AddRequest)
    assert sent.request_id == "x" and sent.sampling.seed is not None
    output = Output("x", 0, [7], spans=[Span("v", 2, 0, 1)], cached_tokens=2)
    fleet.replicas[0].client._receive(m.Outputs([output]))
    assert await stream.reader.wait() == [stream]
    [passed] = stream.read()
    assert passed is output
    fleet.engines[0].output("x", [8], finish_reason="length")
    assert stream.ended and taken(stream) == [[8]] and not fleet.engines[0].of(m.CancelRequest)
    assert fleet.client._relays == {} and fleet.replicas[0].load == 0


@in_loop
async def test_the_rest_of_each_choice_is_a_request_of_its_own(fleet):
    stream = await fleet.client.submit(request(n=3, deadline_s=60.0, max_queue_s=5.0, retain_s=0.0, priority=4))
    old, new = fleet.engines
    fleet.replicas[1].weight_epoch = 2
    old.output("x", [7], 0, spans=[Span("v", 2, 0, 1)], cached_tokens=2)
    old.output("x", [8, 9], 2, finish_reason="stop")
    fleet.lose(0)
    await fleet.settle()
    first, second = new.of(AddRequest)
    assert (first.prompt_token_ids, first.resumed_tokens, first.first_choice) == ([1, 2, 3, 7], 1, 0)
    assert (first.sampling.max_tokens, first.sampling.min_tokens) == (9, 3)
    assert (second.prompt_token_ids, second.resumed_tokens, second.first_choice) == ([1, 2, 3], 0, 1)
    assert first.sampling.prompt_logprobs is None and second.sampling.prompt_logprobs is None
    for add in (first, second):
        assert (add.n, add.group, add.priority) == (1, "x", 4) and add.request_id not in ("x", "")
        assert add.max_queue_s is None and 50 < add.deadline_s <= 60
    assert first.request_id != second.request_id
    new.output(first.request_id, [10], spans=[Span("v", 3, 0, 1)], cached_tokens=4, finish_reason="stop")
    new.output(second.request_id, [11], finish_reason="length")
    outputs = {output.choice: output for output in stream.read()}
    assert [outputs[k].token_ids for k in range(3)] == [[7, 10], [11], [8, 9]]
    assert outputs[0].spans == [Span("v", 2, 0, 1), Span("v", 3, 1, 2, recomputed=True)]
    assert (outputs[0].cached_tokens, outputs[0].num_preempted, outputs[1].num_preempted) == (2, 1, 0)
    assert {output.request_id for output in outputs.values()} == {"x"}
    assert stream.ended and [replica.in_flight for replica in fleet.replicas] == [0, 0]


@in_loop
async def test_no_client_can_have_a_request_of_the_name_under_which_a_choice_goes_on(fleet):
    await fleet.client.submit(request())
    fleet.engines[0].output("x", [7])
    fleet.lose(0)
    await fleet.settle()
    [moved] = fleet.engines[1].of(AddRequest)
    with pytest.raises(InvalidField, match="request_id"):
        parse_body({"request_id": moved.request_id}, GenerationBody, {})
    for name in ("x~0.1", "x-0", "x_0"):  # names of earlier versions of this server
        stream = await fleet.client.submit(request(name))
        assert taken(stream) == [] and fleet.engines[1].of(AddRequest)[-1].request_id == name


@in_loop
async def test_what_waits_while_no_replica_takes_requests_is_bounded_by_their_queues(fleet):
    running = await fleet.client.submit(request("running", n=2))
    for replica in fleet.replicas:
        replica.advance(ReplicaEvent.DRAIN)
    waiting = [await fleet.client.submit(request(f"waits-{i}", n=2)) for i in range(MAX_WAITING)]
    with pytest.raises(QueueFull, match=f"at most {2 * MAX_WAITING} choices") as refused:
        await fleet.client.submit(request("one-too-many"))
    assert refused.value.detail["retry_after"]
    waiting.pop().close()
    waiting.append(await fleet.client.submit(request("in-its-place", n=2)))
    fleet.lose(0)  # what ran there waits too, and takes the place of no other request
    waiting.pop().close()
    waiting.append(await fleet.client.submit(request("the-last", n=2)))
    fleet.replicas[1].advance(ReplicaEvent.UNDRAIN)
    await fleet.settle()
    sent = [add.request_id for add in fleet.engines[1].of(AddRequest)]
    assert sent == ["waits-0", "running", "the-last"] and not running.ended


@in_loop
async def test_the_rest_of_a_retained_request_is_not_kept_by_its_replica(fleet):
    submitting = asyncio.ensure_future(fleet.client.submit(request(retain_s=60.0, fingerprint="f")))
    await asyncio.sleep(0)
    for engine in fleet.engines:
        engine.reply(engine.of(m.Call)[0], known=False)
    await submitting
    fleet.engines[0].output("x", [7])
    fleet.lose(0)
    await fleet.settle()
    [rest] = fleet.engines[1].of(AddRequest)
    assert (rest.retain_s, rest.fingerprint) == (0.0, "f")


@in_loop
async def test_what_a_session_has_seen_never_goes_back(fleet):
    for name in ("new", "old"):
        await fleet.client.submit(request(name, session="s", stale_ok=name == "old"))
    fleet.engines[0].output("new", [7], spans=[Span("v", 3, 0, 1)])
    fleet.engines[0].output("old", [7], spans=[Span("v", 2, 0, 1)])
    assert fleet.client.router.seen(request("next", session="s")).epoch == 3


@in_loop
async def test_a_new_request_does_not_overtake_those_that_wait(fleet):
    await fleet.client.submit(request("first"))
    for i in (0, 1):
        fleet.lose(i)
    fleet.connect(0)
    await fleet.client.submit(request("second"))
    await fleet.settle()
    assert [add.request_id for add in fleet.engines[0].of(AddRequest)] == ["first", "second"]


@in_loop
async def test_a_request_that_has_begun_may_wait_for_longer_than_max_queue_s(fleet):
    await fleet.client.submit(request(max_queue_s=5.0))
    fleet.engines[0].output("x", [7])
    for i in (0, 1):
        fleet.lose(i)
    [part] = fleet.client._dispatcher._waiting
    assert part.timer.when() > part.relay.began + 30.0


@in_loop
async def test_a_stop_and_a_leave_reach_the_replicas_of_moved_choices(fleet):
    stream = await fleet.client.submit(request(n=3))
    for k in range(3):
        fleet.engines[0].output("x", [7], k)
    fleet.lose(0)
    await fleet.settle()
    names = [add.request_id for add in fleet.engines[1].of(AddRequest)]
    stream.stop(1)
    assert fleet.engines[1].of(m.CancelRequest) == [m.CancelRequest(names[1], 0, "stop")]
    stream.close()
    cancels = {(c.request_id, c.choice, c.reason) for c in fleet.engines[1].of(m.CancelRequest)[1:]}
    assert cancels == {(names[0], 0, "abort"), (names[2], 0, "abort")}
    assert fleet.replicas[1].load == 0


@in_loop
async def test_a_leave_of_all_choices_is_one_message(fleet):
    stream = await fleet.client.submit(request(n=3))
    stream.close()
    assert fleet.engines[0].of(m.CancelRequest) == [m.CancelRequest("x", None, "abort")]
    assert fleet.replicas[0].load == fleet.replicas[0].in_flight == 0


@in_loop
async def test_a_choice_that_was_stopped_while_its_request_waited_is_cancelled(fleet):
    stream = await fleet.client.submit(request(n=2))
    fleet.lose(1)
    fleet.lose(0)
    stream.stop(1)
    fleet.connect(1)
    await fleet.settle()
    assert fleet.engines[1].of(m.CancelRequest) == [m.CancelRequest("x", 1, "abort")]
    fleet.engines[1].output("x", [5], 0, finish_reason="stop")
    assert stream.ended and taken(stream) == [[5]]


@pytest.mark.parametrize("code", [QueueFull.code, RequestsRejected.code])
def test_a_refusal_is_passed_on_when_every_replica_refuses(code):
    async def run() -> None:
        fleet = Fleet()
        stream = await fleet.client.submit(request())
        fleet.engines[0].reject("x", code)
        await fleet.settle()
        assert len(fleet.engines[1].of(AddRequest)) == 1 and not stream.ended
        fleet.engines[1].reject("x", code)
        with pytest.raises(QueueFull if code == QueueFull.code else RequestsRejected):
            stream.read()

    asyncio.run(run())


@in_loop
async def test_a_pause_that_rejects_ends_a_choice_with_the_tokens_that_it_has(fleet):
    stream = await fleet.client.submit(request())
    fleet.engines[0].output("x", [7])
    fleet.lose(0)
    await fleet.settle()
    [add] = fleet.engines[1].of(AddRequest)
    fleet.engines[1].reject(add.request_id, RequestsRejected.code)
    [output] = stream.read()
    assert (output.token_ids, output.finish_reason) == ([7], "abort") and stream.ended


@in_loop
async def test_an_error_of_the_request_itself_is_passed_on(fleet):
    stream = await fleet.client.submit(request())
    fleet.engines[0].reject("x", DuplicateRequest.code)
    with pytest.raises(DuplicateRequest):
        stream.read()
    assert not fleet.engines[1].of(AddRequest)


@in_loop
async def test_an_id_in_use_is_refused_though_another_replica_is_free(fleet):
    await fleet.client.submit(request("x"))
    await fleet.client.submit(request("y-0", group="y"))
    await fleet.client.submit(request("y-1", group="y"))
    for add in (request("x"), request("y"), request("z", group="x"), request("y-0", group="y")):
        with pytest.raises(DuplicateRequest):
            await fleet.client.submit(add)


@in_loop
async def test_a_request_that_comes_while_the_gateway_ends_is_refused_at_once(fleet):
    add = request("asked-before", retain_s=60.0, fingerprint="f")
    submitting = asyncio.ensure_future(fleet.client.submit(add))
    await asyncio.sleep(0)
    await fleet.client.abort_open(0.01)
    for engine in fleet.engines:
        engine.reply(engine.of(m.Call)[0], known=False)
    for late in (submitting, fleet.client.submit(request("later"))):
        with pytest.raises(EngineDead, match="shutting down"):
            await late
    assert not any(engine.of(AddRequest) for engine in fleet.engines)


@in_loop
async def test_the_end_of_the_gateway_ends_all_requests(fleet):
    stream = await fleet.client.submit(request())
    fleet.engines[0].output("x", [7])
    closing = asyncio.ensure_future(fleet.client.abort_open(0.01))
    await closing
    assert taken(stream) == [[7]]
    with pytest.raises(EngineDead):
        stream.read()
    assert fleet.replicas[0].state is ReplicaState.MEMBER and fleet.client._relays == {}


@in_loop
async def test_a_replica_that_was_lost_during_a_call_and_is_back_gets_no_more_of_it(fleet):
    call = asyncio.ensure_future(fleet.client.call(m.PauseArgs("wait", hold_id="x", on_timeout="cancel")))
    await asyncio.sleep(0.01)
    [place], [other] = (engine.of(m.Call) for engine in fleet.engines)
    fleet.engines[0].reply(place, status="paused")
    await asyncio.sleep(0.01)
    fleet.lose(0)
    fleet.connect(0)
    fleet.engines[1].refuse(other, "pause_timeout")
    with pytest.raises(FastDeployError):
        await call
    assert not fleet.engines[0].of(m.Call)
