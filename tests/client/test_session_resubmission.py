"""A generation that goes on at the next engine, on a fake engine that a test ends and starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fastdeploy.client import resubmission
from fastdeploy.client.choice import TextOptions
from fastdeploy.client.generation import GenerationRequest
from fastdeploy.client.pace import Pace
from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.client.resubmission import MAX_VAIN_LOSSES, LastingGeneration, rest_of
from fastdeploy.core.errors import EngineDead
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.inter_communicator.messages import Output
from support.fake_runner import EXPERTS, expected_rows


class Engines:
    """A ServingClient whose engines a test plays."""

    def __init__(self) -> None:
        self.connected, self.closing = asyncio.Event(), asyncio.Event()
        self.connected.set()
        self.requests: list[AddRequest] = []
        self.streams: list[RequestStream] = []
        self.cancelled: list[tuple[str, int | None, str]] = []
        self.model_info = {"experts": msgspec.structs.asdict(EXPERTS)}

    async def submit(self, request: AddRequest, reader: Reader | None = None) -> RequestStream:
        self.requests.append(request)
        stream = RequestStream(
            request.request_id, request.n, lambda *a: self.cancelled.append(a), lambda _: None, reader
        )
        self.streams.append(stream)
        return stream

    def send(
        self, tokens: list[int], choice: int = 0, at: int = -1, start: int = 0, reason: str | None = None,
        routed: bytes = b"",
    ) -> None:  # fmt: skip
        """Send tokens of a choice in the stream number ``at``."""
        spans = [Span("v", 1, start, start + len(tokens))]
        logprobs = [Logprob(-1.0) for _ in tokens]
        output = Output("r", choice, tokens, logprobs, spans, finish_reason=reason, routed=routed)
        self.streams[at].put(output)
        self.streams[at].wake()

    def die(self) -> None:
        self.connected.clear()
        for stream in self.streams:
            if not stream.ended:
                stream.fail(EngineDead("it died"))


def generation_of(client: Any, n: int = 1, routed: bool = False, **fields: Any) -> LastingGeneration:
    sampling = SamplingParams(max_tokens=10, seed=7, min_tokens=4, routed_experts=routed)
    add = AddRequest("r", [1, 2], sampling, n=n, **fields)
    return LastingGeneration(
        client, None, GenerationRequest([add], [TextOptions()], streams=True), Pace(asyncio.Lock())
    )


def run(test: Any) -> None:
    asyncio.run(test)


@pytest.fixture
def short(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(resubmission, "RESTART_S", 0.05)
    yield


def test_each_choice_goes_on_with_the_rest_of_its_budget_and_its_own_numbers():
    async def test() -> None:
        client = Engines()
        async with generation_of(client, n=3) as generation:
            client.send([5, 6], choice=0)
            client.send([7], choice=1, reason="stop")
            await generation.step()
            client.die()
            assert await generation.step() == []
            client.connected.set()
            step = asyncio.ensure_future(generation.step())
            await asyncio.sleep(0)
            first, second = client.requests[1:]
            assert (first.first_choice, first.prompt_token_ids, first.resumed_tokens) == (0, [1, 2, 5, 6], 2)
            assert (first.sampling.max_tokens, first.sampling.min_tokens, first.sampling.seed) == (8, 2, 7)
            assert (second.first_choice, second.prompt_token_ids) == (2, [1, 2]) and second.group == first.group == "r"
            client.send([8], at=-2, reason="length")
            client.send([9], at=-1, reason="length")
            deltas = await step
            while not generation.finished:
                deltas += await generation.step()
            assert [(index, delta.first, delta.token_ids) for index, delta in deltas] == [(0, 2, [8]), (2, 0, [9])]
            assert generation.choices[0].token_ids == [5, 6, 8]
            assert [(span.start, span.end) for span in generation.choices[0].spans] == [(0, 3)]

    run(test())


def test_a_request_without_a_token_is_sent_again_as_it_was():
    async def test() -> None:
        client = Engines()
        async with generation_of(client, n=2) as generation:
            client.die()
            await generation.step()
            client.connected.set()
            step = asyncio.ensure_future(generation.step())
            await asyncio.sleep(0)
            assert client.requests[0] == client.requests[1]
            client.send([5], reason="stop")
            assert (await step)[0][1].token_ids == [5]

    run(test())


def test_rows_that_came_are_not_asked_for_again_and_none_is_lost():
    rows, size = expected_rows([1, 2, 5, 6, 8, 9], EXPERTS), EXPERTS.row_bytes

    async def test() -> None:
        client = Engines()
        async with generation_of(client, n=2, routed=True) as generation:
            client.send([5, 6], choice=0, routed=rows[: 3 * size])
            await generation.step()
            client.die()
            await generation.step()
            client.connected.set()
            step = asyncio.ensure_future(generation.step())
            await asyncio.sleep(0)
            asked = [request.sampling for request in client.requests[1:]]
            assert [(s.routed_experts, s.routed_experts_start) for s in asked] == [(True, 3), (True, 0)]
            client.send([8, 9], at=-2, reason="length", routed=rows[3 * size :])
            client.send([5], at=-1, reason="length", routed=rows[: 2 * size])
            await step
            while not generation.finished:
                await generation.step()
            assert [choice.routed_experts.data for choice in generation.choices] == [rows, rows[: 2 * size]]

    run(test())


def test_a_nudge_returns_while_there_is_no_engine():
    async def test() -> None:
        client = Engines()
        async with generation_of(client) as generation:
            client.die()
            await generation.step()
            generation.nudge()
            assert await generation.step() == [] and len(client.requests) == 1

    run(test())


def test_a_request_that_ends_one_engine_after_the_other_fails():
    async def test() -> None:
        client = Engines()
        async with generation_of(client) as generation:
            for _ in range(MAX_VAIN_LOSSES - 1):
                client.die()
                assert await generation.step() == []
                client.connected.set()
                step = asyncio.ensure_future(generation.step())
                await asyncio.sleep(0)
                generation.nudge()
                await step
            client.die()
            with pytest.raises(EngineDead):
                await generation.step()

    run(test())


def test_it_fails_if_no_engine_comes_and_when_the_server_shuts_down(short):
    async def test() -> None:
        client = Engines()
        async with generation_of(client) as generation:
            client.die()
            await generation.step()
            with pytest.raises(EngineDead):
                for _ in range(10):
                    await generation.step()
        client.closing.set()
        async with generation_of(client) as generation:
            client.die()
            with pytest.raises(EngineDead):
                await generation.step()

    run(test())


def test_the_rest_of_a_rest_is_that_of_the_whole():
    whole = AddRequest("r", [1], SamplingParams(max_tokens=9, min_tokens=1), first_choice=4, n=2, max_queue_s=3.0)
    rest = rest_of(whole, "r/1", 1, [5, 6])
    assert rest.max_queue_s is None and rest_of(whole, "r/0", 0, []).max_queue_s == 3.0
    assert (rest.request_id, rest.group, rest.n, rest.first_choice) == ("r/1", "r", 1, 5)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens, rest.resumed_tokens) == (7, 0, 2)
