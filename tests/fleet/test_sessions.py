"""A client never sees newer weights and then older ones in one session, unless it allows that."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from e2e.server import until
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output
from fleet.fake_fleet import FakeFleet, fake_fleet


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(2) as fleet:
        yield fleet


def on_loop(fleet: FakeFleet, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Run a coroutine on the gateway's event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, fleet.client._task.get_loop())


def request(name: str, **fields: Any) -> AddRequest:
    return AddRequest(name, [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), **fields)


async def finish(stream: RequestStream) -> Output:
    with stream:
        while True:
            await stream.reader.wait()
            for output in stream.read():
                if output.finish_reason is not None:
                    return output


def ask(fleet: FakeFleet, add: AddRequest) -> asyncio.Future[Output]:
    async def run() -> Output:
        return await finish(await fleet.client.submit(add))

    return on_loop(fleet, run())


def see(fleet: FakeFleet, session: str, epoch: int) -> None:
    """Make a session that has seen ``epoch``."""
    fleet.client.router.seen(request("seen", session=session)).epoch = epoch


def test_an_answer_sets_the_epoch_of_its_session(fleet):
    output = ask(fleet, request("a", session="s")).result(20)
    newest = output.spans[-1].weight_epoch
    assert fleet.client.router.seen(request("a", session="s")).epoch == newest


def test_a_session_waits_until_a_replica_serves_what_it_has_seen(fleet):
    see(fleet, "s", 1)
    answer = ask(fleet, request("a", session="s"))
    until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
    assert ask(fleet, request("b", session="other")).result(20).finish_reason == "length", "others do not wait"
    assert fleet.http.post("/v1/update_weights", json={"model_path": "/nowhere/w1"}).status_code == 200
    assert answer.result(20).spans[0].weight_epoch == 1
    assert fleet.client._dispatcher.num_waiting == 0


def test_sessions_wait_for_weights_that_another_gateway_may_have_shown(fleet):
    fleet.client._dispatcher._session_epoch = lambda: 1
    answer = ask(fleet, request("a", session="new"))
    until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
    assert ask(fleet, request("b")).result(20).finish_reason == "length", "it has no session"
    assert ask(fleet, request("c", session="s", stale_ok=True)).result(20).finish_reason == "length"
    assert fleet.http.post("/v1/update_weights", json={"model_path": "/nowhere/w1"}).status_code == 200
    assert answer.result(20).spans[0].weight_epoch == 1


def test_a_session_that_no_replica_may_serve_fails_after_a_while():
    with fake_fleet(1, config=FleetConfig(fleet_id="fleet-1", failover_s=0.2)) as fleet:
        see(fleet, "s", 3)
        with pytest.raises(EngineDead, match="weight_epoch 3"):
            ask(fleet, request("a", session="s")).result(20)
        assert fleet.client._relays == {}


def test_a_request_with_stale_ok_waits_for_no_weights(fleet):
    see(fleet, "s", 3)
    assert ask(fleet, request("a", session="s", stale_ok=True)).result(20).finish_reason == "length"


def test_a_request_that_waits_ends_at_its_deadline_and_by_an_abort(fleet):
    see(fleet, "s", 3)
    output = ask(fleet, request("a", session="s", deadline_s=0.05)).result(20)
    assert (output.finish_reason, output.stop_reason) == ("abort", "deadline")
    output = ask(fleet, request("b", session="s", max_queue_s=0.05)).result(20)
    assert (output.finish_reason, output.stop_reason) == ("abort", "queue_timeout")
    answer = ask(fleet, request("c", session="s"))
    until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
    report = fleet.http.post("/v1/abort_requests", json={"req_ids": ["c", "d"]}).json()["result"]
    assert report["aborted"] == [{"request_id": "c", "output_token_count": 0}] and report["not_found"] == ["d"]
    assert answer.result(20).message.startswith("Abort before prefill")


def test_a_client_that_leaves_takes_its_request_out_of_the_queue(fleet):
    see(fleet, "s", 3)

    async def come_and_go() -> int:
        stream = await fleet.client.submit(request("a", session="s"))
        waiting = fleet.client._dispatcher.num_waiting
        stream.close()
        return waiting

    assert on_loop(fleet, come_and_go()).result(20) == 1
    assert fleet.client._dispatcher.num_waiting == 0 and fleet.client._relays == {}


@pytest.mark.parametrize(
    "args", [m.PauseArgs("abort", hold_id="h"), m.SleepArgs(mode="abort"), m.ResetArgs()], ids=lambda args: type(args)
)
def test_a_call_that_aborts_all_requests_ends_those_that_wait_in_the_gateway(fleet, args):
    see(fleet, "s", 3)
    answer = ask(fleet, request("a", session="s"))
    until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
    report = on_loop(fleet, fleet.client.call(args)).result(20)
    output = answer.result(20)
    assert (output.finish_reason, output.token_ids) == ("abort", []) and fleet.client._dispatcher.num_waiting == 0
    assert output.message.startswith("Abort before prefill: ")
    if isinstance(args, m.PauseArgs):
        assert report["aborted_ids"] == ["a"] and report["counts"]["aborted"] == 1
    if isinstance(args, m.ResetArgs):
        assert report["aborted"] == 1


def test_other_pauses_leave_what_waits_in_the_gateway(fleet):
    see(fleet, "s", 3)
    ask(fleet, request("a", session="s"))
    until(lambda: fleet.client._dispatcher.num_waiting == 1, 20, "the request waits")
    on_loop(fleet, fleet.client.call(m.PauseArgs("keep"))).result(20)
    assert fleet.client._dispatcher.num_waiting == 1
