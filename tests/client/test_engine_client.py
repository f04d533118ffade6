"""The engine client: every request and call is answered, whatever the engine does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from fastdeploy.client.engine_client import STALL_SLICES, EngineClient
from fastdeploy.core import errors
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector
from support.fake_engine_server import FakeEngine, reply_with
from support.loop_clock import pass_time


@pytest.fixture
def endpoint():
    path = ipc_dir.create()
    yield ipc_dir.endpoint(path)
    ipc_dir.remove(path)


@pytest.fixture
def engine(endpoint):
    engine = FakeEngine(endpoint)
    yield engine
    engine.die()


@asynccontextmanager
async def connected(endpoint: str, engine: FakeEngine | None, **settings):
    """Run a client of ``endpoint``, which is connected if there is an ``engine``."""
    client = EngineClient(ZmqConnector(endpoint), **settings)
    client.start()
    try:
        if engine is not None:
            async with asyncio.timeout(30):
                await client.connected.wait()
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(endpoint, engine):
    async with connected(endpoint, engine) as client:
        yield client


def request(request_id: str = "r", **fields) -> AddRequest:
    return AddRequest(request_id, [1, 2], SamplingParams(), **fields)


def retained(fingerprint: str = "f") -> AddRequest:
    return request(retain_s=9.0, fingerprint=fingerprint)


async def next_outputs(stream) -> list[m.Output]:
    """Wait for outputs or the failure, and take them."""
    while True:
        if outputs := stream.read():
            return outputs
        await stream.reader.wait()


async def collect(stream) -> list[m.Output]:
    outputs = []
    while not stream.ended or not outputs:
        outputs += await next_outputs(stream)
    return outputs


async def expect(engine: FakeEngine, kind: type):
    return await asyncio.to_thread(engine.expect, kind)


async def test_outputs_of_all_choices_arrive_in_order(engine, client):
    with await client.submit(request(n=2)) as stream:
        await expect(engine, AddRequest)
        for token, reason in ((5, None), (6, None), (7, "length")):
            for choice in (0, 1):
                engine.emit("r", [token], choice, finish_reason=reason)
        outputs = await collect(stream)
    for choice in (0, 1):  # a late reader finds several outputs joined to one
        assert [token for o in outputs if o.choice == choice for token in o.token_ids] == [5, 6, 7]


async def test_a_message_that_cannot_be_encoded_raises_and_its_id_stays_free(engine, client):
    with pytest.raises(OverflowError):
        await client.submit(request(priority=2**70))
    with pytest.raises(OverflowError):
        await client.call(m.PauseArgs(timeout_s=2**70))
    assert not client._calls
    with await client.submit(request()) as stream:
        await expect(engine, AddRequest)
        engine.emit("r", [5], finish_reason="length")
        assert [o.token_ids for o in await collect(stream)] == [[5]]


async def test_death_of_the_engine_answers_every_open_call_and_request_at_once(endpoint):
    engine = FakeEngine(endpoint)
    engine.replies[m.PauseArgs] = lambda call: None
    async with connected(endpoint, engine) as client:
        stream = await client.submit(request())
        call = asyncio.create_task(client.call(m.PauseArgs()))
        await expect(engine, m.PauseArgs)
        engine.emit("r", [9])
        engine.die()
        assert [o.token_ids for o in await next_outputs(stream)] == [[9]], "outputs sent before the death arrive"
        for pending in (next_outputs(stream), call, client.submit(request("s")), client.call(m.ResumeArgs())):
            with pytest.raises(errors.EngineDead):
                await pending


async def test_a_restarted_engine_is_found_under_a_new_identity(endpoint):
    first = FakeEngine(endpoint)
    async with connected(endpoint, first) as client:
        assert client.welcome.boot_id == "boot-1"
        first.die()
        while client.connected.is_set():
            await asyncio.sleep(0)
        second = FakeEngine(endpoint, reply_with([1]), boot_id="boot-2")
        await client.connected.wait()
        assert client.welcome.boot_id == "boot-2"
        assert set(first.clients).isdisjoint(second.clients)
        with await client.submit(request()) as stream:
            assert (await collect(stream))[0].token_ids == [1]
        second.die()


async def test_before_the_engine_is_there_requests_fail_fast_and_then_work(endpoint):
    async with connected(endpoint, None) as client:
        with pytest.raises(errors.EngineDead):
            await client.submit(request())
        engine = FakeEngine(endpoint, reply_with([1]))
        await client.connected.wait()
        (await client.submit(request())).close()
        engine.die()


async def test_a_fence_is_acknowledged_only_after_earlier_outputs_are_in_their_queues(engine, client):
    stream = await client.submit(request())
    await expect(engine, AddRequest)
    engine.emit("r", [1])
    engine.send(m.Fence(fence_id=4))
    assert (await expect(engine, m.FenceAck)).fence_id == 4  # nothing has read the stream so far
    assert [o.token_ids for o in stream.read()] == [[1]]
    stream.close()


@pytest.mark.parametrize(
    ("message", "why"),
    [(m.Goodbye(), "dropped this API server"), (m.Outputs([m.Output("r", 0)]), "could not be handled")],
    ids=["goodbye", "unexpected"],
)
async def test_a_message_that_ends_the_connection_fails_requests_and_the_client_connects_again(
    engine, client, message, why
):
    stream = await client.submit(request())
    await expect(engine, AddRequest)
    stream.put = None  # an output cannot be handled
    engine.send(message)
    with pytest.raises(errors.EngineDead, match=why):
        await next_outputs(stream)
    await client.connected.wait()
    assert len(set(engine.clients)) == 2


async def test_a_rejected_request_raises_the_engines_error(engine, client):
    stream = await client.submit(request())
    await expect(engine, AddRequest)
    engine.send(m.Rejected("r", m.Failure("queue_full", "full", {"retry_after": 1})))
    with pytest.raises(errors.QueueFull) as info:
        await next_outputs(stream)
    assert info.value.detail == {"retry_after": 1}
    await client.submit(request())  # its id is free again


async def test_the_id_of_an_open_request_is_refused(client):
    await client.submit(request())
    with pytest.raises(errors.DuplicateRequest):
        await client.submit(request())


async def test_a_retained_request_sent_again_takes_over_and_one_with_another_body_does_not(engine, client):
    first = await client.submit(retained())
    with pytest.raises(errors.DuplicateRequest):
        await client.submit(retained("g"))
    with pytest.raises(errors.DuplicateRequest):
        await client.submit(request())
    assert not first.ended
    second = await client.submit(retained())
    with pytest.raises(errors.AttachedElsewhere):
        await next_outputs(first)
    assert await expect(engine, m.CancelRequest) == m.CancelRequest("r", None, "abort")
    engine.emit("r", [1], finish_reason="stop")
    assert [o.token_ids for o in await collect(second)] == [[1]]


async def test_of_many_equal_retained_requests_at_once_the_last_takes_over_and_the_others_fail(engine, client):
    (await client.submit(retained())).close()
    streams = await asyncio.gather(*(client.submit(retained()) for _ in range(4)))
    live = [stream for stream in streams if not stream.ended]
    assert len(live) == 1
    for stream in streams:
        if stream is not live[0]:
            with pytest.raises(errors.AttachedElsewhere):
                await next_outputs(stream)
    assert "r" not in client._cancelled and client._streams["r"] is live[0]


async def test_shutdown_leaves_a_retained_request_to_run_on(engine, client):
    aborted = []
    engine.replies[m.AbortArgs] = lambda call: aborted.extend(call.args.request_ids) or m.Reply(call.call_id, {})
    stream = await client.submit(retained())
    await client.submit(request("s"))
    await client.abort_open(0.2)
    with pytest.raises(errors.EngineDead):
        await next_outputs(stream)
    assert aborted == ["s"]


async def test_late_outputs_of_a_cancelled_request_never_reach_a_new_one_of_the_same_id(engine, client):
    late = m.Output("r", 0, token_ids=[666], finish_reason="length")
    begun, gate = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        gate.wait()
        engine._transport.send(engine.clients[-1], m.Outputs([late]))

    stream = await client.submit(request())
    await expect(engine, AddRequest)
    engine.do(step)  # the engine is in a step: it has not seen the cancel when it sends the output
    await asyncio.to_thread(begun.wait)
    stream.close()
    submitting = asyncio.create_task(client.submit(request()))
    await asyncio.sleep(0.05)
    gate.set()
    stream = await submitting
    await expect(engine, AddRequest)
    engine.emit("r", [1], finish_reason="stop")
    assert [o.token_ids for o in await collect(stream)] == [[1]]


async def test_a_request_that_waited_while_the_engine_was_lost_fails_and_is_not_forgotten(engine, client):
    (await client.submit(request())).close()
    engine.replies[m.PauseStatusArgs] = lambda call: None
    waiting = asyncio.create_task(client.submit(request()))  # for the outputs of the cancelled request
    call = await expect(engine, m.PauseStatusArgs)
    client._receive(m.Reply(call.call_id, {}))
    client._disconnect(errors.EngineDead("lost"))  # after the reply, and before the waiting task goes on
    with pytest.raises(errors.EngineDead):
        await waiting
    assert not client._streams


async def test_closing_a_stream_cancels_only_the_choices_that_run(engine, client):
    stream = await client.submit(request(n=3))
    await expect(engine, AddRequest)
    stream.stop(1)
    assert await expect(engine, m.CancelRequest) == m.CancelRequest("r", 1, "stop")
    engine.emit("r", [1], choice=1)
    engine.emit("r", [2], choice=0, finish_reason="length")
    assert [o.choice for o in await next_outputs(stream)] == [0], "a stopped choice is silent"
    stream.close()
    assert await expect(engine, m.CancelRequest) == m.CancelRequest("r", 2, "abort")


async def test_a_failed_call_raises_its_typed_error_with_the_report(engine, client):
    failure = m.Failure("pause_interrupted", "resumed", {"x": 1})
    engine.replies[m.PauseArgs] = lambda call: m.Reply(call.call_id, {"state": "running"}, failure)
    with pytest.raises(errors.PauseInterrupted) as info:
        await client.call(m.PauseArgs())
    assert info.value.detail == {"x": 1, "report": {"state": "running"}}


@pytest.fixture
def process():
    """Stands for the process of ``killable``."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def killable(endpoint, process):
    engine = FakeEngine(endpoint, pid=process.pid)
    yield engine
    engine.die()


STALL_S = 60.0


async def pass_slices_until(condition: Callable[[], bool]) -> None:
    """Let slices of the watch pass, by the event loop's clock, until ``condition`` is true."""
    while not condition():
        pass_time(STALL_S / STALL_SLICES)
        await asyncio.sleep(0.001)


async def test_a_silent_engine_is_killed_though_nobody_calls_and_answers_everything_that_is_open(
    endpoint, killable, process
):
    async with connected(endpoint, killable, stall_s=STALL_S) as client:
        stream = await client.submit(request())
        await expect(killable, AddRequest)
        killable.beating = False
        read = asyncio.ensure_future(next_outputs(stream))
        await pass_slices_until(read.done)
        with pytest.raises(errors.EngineStalled, match="silent for 60 s"):
            await read
        assert await asyncio.to_thread(process.wait, 30) == -signal.SIGKILL


CALLS = (m.PauseArgs(), m.MetricsArgs(), m.WeightInfoArgs(), m.SetVersionArgs("v"), m.SleepArgs())


async def test_all_calls_to_a_silent_engine_end_as_stalled(endpoint, killable):
    killable.replies = {type(args): lambda call: None for args in CALLS}
    async with connected(endpoint, killable, stall_s=STALL_S) as client:
        killable.beating = False
        calls = asyncio.gather(*map(client.call, CALLS), return_exceptions=True)
        await pass_slices_until(calls.done)
        assert {type(result) for result in await calls} == {errors.EngineStalled}


async def test_an_engine_that_beats_is_never_killed_however_long_a_call_takes(endpoint, killable, process):
    killable.replies = {type(args): lambda call: None for args in CALLS}
    async with connected(endpoint, killable, stall_s=STALL_S) as client:
        calls = asyncio.gather(*map(client.call, CALLS))
        sent = [await expect(killable, type(args)) for args in CALLS]
        for _ in range(3 * STALL_SLICES):
            received = client._num_received
            pass_time(STALL_S / STALL_SLICES)
            while client._num_received == received:
                await asyncio.sleep(0.001)
        assert process.poll() is None and not calls.done()
        for call in sent:
            killable.send(m.Reply(call.call_id, {"ok": 1}))
        assert await calls == [{"ok": 1}] * len(CALLS)


async def test_an_engine_is_not_killed_because_the_event_loop_of_the_client_was_blocked(endpoint, killable, process):
    async with connected(endpoint, killable, stall_s=0.2) as client:
        for _ in range(12):
            time.sleep(0.1)  # four slices each, and no heartbeat is read in them
            await asyncio.sleep(0)
        await client.call(m.PauseStatusArgs())
        assert process.poll() is None


async def test_shutdown_ends_open_requests_through_the_engine_or_after_the_bound(engine, client):
    def abort(call: m.Call) -> m.Reply:
        output = m.Output("r", 0, token_ids=[3], finish_reason="abort")
        engine._transport.send(engine.clients[-1], m.Outputs([output]))
        return m.Reply(call.call_id, {})

    stream = await client.submit(request())
    await expect(engine, AddRequest)
    engine.replies[m.AbortArgs] = abort
    await client.abort_open(5.0)
    assert [(o.token_ids, o.finish_reason) for o in await next_outputs(stream)] == [([3], "abort")]
    stuck = await client.submit(request("s"))
    engine.replies[m.AbortArgs] = lambda call: None
    await client.abort_open(0.1)
    with pytest.raises(errors.EngineDead):
        await next_outputs(stuck)


async def test_the_reply_to_a_call_does_not_wait_for_the_readers_of_all_requests_that_the_call_ended(engine, client):
    names = [f"r{i}" for i in range(1000)]

    def end_all(call: m.Call) -> None:
        outputs = [m.Output(name, 0, token_ids=[3], finish_reason="abort") for name in names]
        engine._transport.send(engine.clients[-1], m.Outputs(outputs))
        engine._transport.send(engine.clients[-1], m.Fence(1))

    def reply_once_delivered() -> None:
        call = engine.expect(m.AbortArgs)
        assert engine.expect(m.FenceAck) == m.FenceAck(1)
        engine.send(m.Reply(call.call_id, {}))

    engine.replies[m.AbortArgs] = end_all
    served: list[list[m.Output]] = []

    async def abort_all() -> int:
        """Return the number of readers that had been served when the call returned."""
        await client.call(m.AbortArgs(abort_all=True))
        return len(served)

    async def read(stream) -> None:
        outputs = await collect(stream)
        if not abort.done():
            time.sleep(0.001)  # the loop is busy with an answer; the engine's threads may run
        served.append(outputs)

    streams = [await client.submit(request(name)) for name in names]
    replying = asyncio.create_task(asyncio.to_thread(reply_once_delivered))
    abort = asyncio.create_task(abort_all())
    await asyncio.gather(*map(read, streams))
    await replying
    assert await abort < len(names), "the call returned after the last reader"
    ends = [(output.request_id, output.finish_reason) for outputs in served for output in outputs]
    assert sorted(ends) == sorted((name, "abort") for name in names), "one final output each"
    assert not any(stream.read() for stream in streams)


async def test_the_reader_of_a_token_is_woken_before_the_readers_of_ended_requests(engine, client):
    names = [f"r{i}" for i in range(1000)]
    order: list[str] = []

    async def read(stream) -> None:
        await next_outputs(stream)
        order.append(stream.request_id)

    streams = [await client.submit(request(name)) for name in [*names, "live"]]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0)  # all readers wait
    ends = [m.Output(name, 0, token_ids=[3], finish_reason="abort") for name in names]
    engine.send(m.Outputs([*ends, m.Output("live", 0, token_ids=[4])]))
    await asyncio.gather(*readers)
    assert order[0] == "live"
    streams[-1].close()


async def test_a_stream_with_outputs_of_many_choices_wakes_its_reader_once(engine, client):
    n = 100
    wakes: list[int] = []

    async def read(stream) -> None:
        while sum(wakes) < n:
            wakes.append(len(await next_outputs(stream)))

    stream = await client.submit(request("r", n=n))
    reader = asyncio.create_task(read(stream))
    engine.send(m.Outputs([m.Output("r", choice, token_ids=[4]) for choice in range(n)]))
    await reader
    assert wakes == [n] and not client._with_tokens
    stream.close()


async def test_closing_the_client_leaves_no_open_files(endpoint, engine):
    for _ in range(3):
        async with connected(endpoint, engine):
            pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with connected(endpoint, engine):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before + 2
