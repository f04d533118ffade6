"""Calls that end a request which waits in the gateway, or whose replica is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidField, QueueFull
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.endings import Ended, EndingCall
from fastdeploy.inter_communicator import messages as m
from fleet.played_fleet import Fleet, in_loop, request


@pytest.mark.parametrize(
    ("args", "ends_base", "ends_adapter"),
    [
        (m.PauseArgs("abort"), True, True),
        (m.PauseArgs("ABORT", hold_id="h"), True, True),
        (m.PauseArgs("abort", scope="adapter:a"), False, True),
        (m.PauseArgs("abort", scope="adapter:b"), False, False),
        (m.PauseArgs("wait"), False, False),
        (m.PauseArgs("keep"), False, False),
        (m.SleepArgs(mode="abort"), True, True),
        (m.SleepArgs(), False, False),
        (m.ResetArgs(), True, True),
        (m.AbortArgs(request_ids=["x"]), True, True),
        (m.AbortArgs(request_ids=["y"]), False, False),
        (m.AbortArgs(lora_name="a"), False, True),
        (m.AbortArgs(abort_all=True), True, True),
        (m.ResumeArgs(), False, False),
        (m.UnloadAdapterArgs("a"), False, True),
        (m.UnloadAdapterArgs("b"), False, False),
    ],
)
def test_a_call_ends_the_requests_that_it_would_end_at_an_engine(args, ends_base, ends_adapter):
    for adapter, ends in (("", ends_base), ("a", ends_adapter)):
        request = AddRequest("x", [1], SamplingParams(), adapter=adapter)
        assert (EndingCall(args).why(request) is not None) is ends


@pytest.mark.parametrize(
    ("args", "ends_base", "ends_adapter"),
    [
        (m.PauseArgs("abort"), False, False),
        (m.SleepArgs(mode="abort"), False, False),
        (m.ResetArgs(), False, True),  # a reset unloads adapters
        (m.AbortArgs(abort_all=True), False, False),
        (m.AbortArgs(lora_name="a"), False, False),
        (m.AbortArgs(request_ids=["x"]), True, True),
        (m.AbortArgs(session="s"), True, True),
        (m.AbortArgs(session="t"), False, False),
        (m.UnloadAdapterArgs("a"), False, True),
    ],
)
def test_a_request_that_survives_aborts_is_ended_by_its_name_or_without_its_adapter(args, ends_base, ends_adapter):
    for adapter, ends in (("", ends_base), ("a", ends_adapter)):
        request = AddRequest("x", [1], SamplingParams(), adapter=adapter, session="s", survives_aborts=True)
        assert (EndingCall(args).why(request) is not None) is ends


def test_an_adapter_whose_requests_ended_in_the_gateway_was_found():
    nobody = {"aborted": [], "not_found": ["a"]}  # by the engines
    ending = EndingCall(m.AbortArgs(lora_name="a"))
    assert ending.report(nobody) == nobody
    ending.count("x", 1, 3)
    assert ending.ended == {"x": Ended(1, 3)}
    ended = {"request_id": "x", "output_token_count": 3}
    assert ending.report(nobody) == {"aborted": [ended], "not_found": []}


# What a replica answers that has no request.
ABORTED: dict[str, Any] = {"aborted": [], "not_found": ["x"]}
PAUSED: dict[str, Any] = {"aborted_ids": [], "counts": {"aborted": 0}, "tokens_returned": 0, "hold": {}}
PAUSED["hold"] = {"id": "h", "scope": "engine"}
UNLOADED: dict[str, Any] = {"lora_name": "a", "adapter_epoch": 1}
CALLS_THAT_END: list[tuple[m.Args, dict[str, Any], str, str | None]] = [
    (m.AbortArgs(abort_all=True), ABORTED, "aborted by request", None),
    (m.AbortArgs(request_ids=["x"]), ABORTED, "aborted by request", None),
    (m.AbortArgs(lora_name="a"), ABORTED, "aborted by request", None),
    (m.PauseArgs("abort", hold_id="h"), PAUSED, "paused by hold 'h'", None),
    (m.SleepArgs(mode="abort"), PAUSED | {"asleep": []}, "paused by hold 'sleep'", None),
    (m.SleepArgs(mode="abort", discard=True), PAUSED | {"asleep": []}, "paused by hold 'sleep'", None),
    (m.ResetArgs(), {"aborted": 0, "version": "v"}, "the trainer starts over (reset)", "adapter_unloaded"),
    (m.UnloadAdapterArgs("a"), UNLOADED, "adapter 'a' was unloaded", "adapter_unloaded"),
]


class Called:
    """A control call that is sent when this has been awaited."""

    def __init__(self, fleet: Fleet, args: m.Args):
        self.fleet = fleet
        self.task = asyncio.ensure_future(fleet.client.call(args))

    async def sent(self) -> list[m.Call]:
        """Return the last call that each engine has got."""
        for _ in range(5):
            await asyncio.sleep(0)
        return [engine.of(m.Call)[-1] for engine in self.fleet.engines]


@pytest.mark.parametrize(("args", "answer", "why", "stop_reason"), CALLS_THAT_END)
def test_a_call_ends_the_requests_of_a_replica_that_is_lost_in_it(args, answer, why, stop_reason):
    async def run() -> None:
        fleet = Fleet()
        stream = await fleet.client.submit(request(n=2, adapter="a"))
        fleet.engines[0].output("x", [7, 8])
        called = Called(fleet, args)
        _, call = await called.sent()
        fleet.lose(0)
        fleet.engines[1].reply(call, **answer)
        report = await called.task
        first, second = stream.read()
        assert stream.ended and (first.choice, first.token_ids, second.choice, second.token_ids) == (0, [7, 8], 1, [])
        for output, message in ((first, why), (second, f"Abort before prefill: {why}")):
            assert (output.finish_reason, output.stop_reason) == ("abort", stop_reason)
            assert output.message.startswith(message)
        match args:
            case m.AbortArgs():
                assert report["aborted"] == [{"request_id": "x", "output_token_count": 2}] and not report["not_found"]
            case m.ResetArgs():
                assert report["aborted"] == 1
            case m.PauseArgs() | m.SleepArgs():
                assert (report["aborted_ids"], report["counts"], report["tokens_returned"]) == (
                    ["x"],
                    {"aborted": 2},
                    2,
                )
        await fleet.settle()
        assert not fleet.engines[1].of(AddRequest)

    asyncio.run(run())


@in_loop
async def test_a_replica_that_is_lost_behind_its_answer_has_ended_its_requests(fleet):
    stream = await fleet.client.submit(request())
    fleet.engines[0].output("x", [7])
    called = Called(fleet, m.AbortArgs(abort_all=True))
    calls = await called.sent()
    for engine, call in zip(fleet.engines, calls, strict=True):
        engine.reply(call, aborted=[], not_found=[])
    await called.task
    fleet.lose(0)
    assert stream.ended and [(o.token_ids, o.finish_reason) for o in stream.read()] == [([7], "abort")]


@in_loop
async def test_a_request_that_a_replica_refuses_goes_to_no_other_one_behind_a_call_that_ends_it(fleet):
    stream = await fleet.client.submit(request())
    called = Called(fleet, m.ResetArgs())
    await called.sent()
    fleet.engines[0].reject("x", QueueFull.code)
    await fleet.settle()
    [output] = stream.read()
    assert output.finish_reason == "abort" and not fleet.engines[1].of(AddRequest)
    called.task.cancel()


@pytest.mark.parametrize("waits", [True, False], ids=["caller-waits", "caller-left"])
@pytest.mark.parametrize("refused_by", [(0,), (0, 1)], ids=["rolled-back", "refused-by-all"])
def test_a_call_that_fails_ends_no_request_later(refused_by, waits):
    async def run() -> None:
        fleet = Fleet()
        stream = await fleet.client.submit(request())
        fleet.engines[0].output("x", [7])
        called = Called(fleet, m.PauseArgs("abort", hold_id="h"))
        calls = await called.sent()
        if not waits:
            called.task.cancel()
        for i, call in enumerate(calls):
            if i in refused_by:
                fleet.engines[i].refuse(call, InvalidField.code)
            else:
                fleet.engines[i].reply(call, **PAUSED)
        for engine, call in zip(fleet.engines, await called.sent(), strict=True):  # the rollback
            engine.reply(call)
        with pytest.raises(InvalidField if waits else asyncio.CancelledError):
            await called.task
        await called.sent()
        fleet.lose(0)
        await fleet.settle()
        [moved] = fleet.engines[1].of(AddRequest)
        fleet.engines[1].output(moved.request_id, [8], finish_reason="stop")
        assert stream.ended and [output.finish_reason for output in stream.read()] == ["stop"]

    asyncio.run(run())


@in_loop
async def test_an_abort_of_one_id_ends_no_other_request_of_a_replica_that_is_lost_in_it(fleet):
    one = await fleet.client.submit(request("one"))
    other = await fleet.client.submit(request("other", session="s"))
    fleet.engines[0].output("one", [7])
    called = Called(fleet, m.AbortArgs(request_ids=["one"]))
    _, call = await called.sent()
    later = await fleet.client.submit(request("later"))
    fleet.lose(0)
    fleet.engines[1].reply(call, aborted=[], not_found=["one"])
    assert [entry["request_id"] for entry in (await called.task)["aborted"]] == ["one"]
    await fleet.settle()
    assert one.ended and not other.ended and not later.ended
    assert {add.request_id for add in fleet.engines[1].of(AddRequest)} == {"other", "later"}
