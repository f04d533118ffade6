"""A large reply does not keep the event loop from other work. The tests count rounds of the loop, not seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.client.choice import Choice, TextOptions, pieces
from fastdeploy.client.generation import TOKENS_AT_ONCE, WORK_PER_TOKEN, Generation, GenerationRequest
from fastdeploy.client.pace import SLICE, GrowingArray, Pace
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.sglang import generate as sglang_generate
from fastdeploy.http.dialects.sglang import generate_body as sglang_generate_body
from fastdeploy.http.dialects.vllm import generate as vllm_generate
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.openai.protocol import ChatBody, CompletionBody
from fastdeploy.http.openai.serving_chat import ChatView
from fastdeploy.http.openai.serving_completion import CompletionView
from fastdeploy.inter_communicator.messages import Output

TOP, TOKENS, CHOICES = 20, 400, 3
ENTRY = Logprob(-0.5, tuple((97 + i, -1.0 - i) for i in range(TOP)))
PROMPT = [97] * 5


async def rounds(work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the result of ``work``, and the number of rounds of the event loop that it took."""
    count = 0

    async def beat() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0)
    before = count
    result = await work
    told = count - before
    heart.cancel()
    return result, told


class FilledClient:
    """A client that has the whole output of each request at once."""

    welcome = SimpleNamespace(boot_id="boot", max_model_len=10**6)

    async def submit(self, request, reader) -> RequestStream:
        stream = RequestStream(request.request_id, request.n, lambda *_: None, lambda _: None, reader)
        for choice in range(request.n):
            prompt_logprobs = [ENTRY] * (len(request.prompt_token_ids) - 1) if choice == 0 else []
            stream.put(
                Output(
                    request.request_id,
                    choice,
                    token_ids=[97 + i % 26 for i in range(TOKENS)],
                    logprobs=[ENTRY] * TOKENS,
                    spans=[Span("v1", 1, 0, TOKENS)],
                    finish_reason="length",
                    prompt_logprobs=prompt_logprobs,
                )
            )
        reader.wake(stream)
        return stream


@pytest.fixture
def context(tokenizer) -> ServingContext:
    config = ServeConfig(model="m", served_model_name="tiny")
    return ServingContext(FilledClient(), tokenizer, config, Budget(1, 1.0, "uploads"))


def generation_of(context: ServingContext, kind: type[Generation] = Generation, prompt=PROMPT) -> Generation:
    request = GenerationRequest([AddRequest("r", prompt, SamplingParams(), n=CHOICES)], [TextOptions()])
    return kind(context.client, context.tokenizer, request, context.pace())


def completion(context: ServingContext):
    return CompletionView(context, generation_of(context), CompletionBody(prompt="a", logprobs=TOP, n=CHOICES))


def chat(context: ServingContext):
    body = ChatBody(messages=[{"role": "user"}], logprobs=True, top_logprobs=TOP, n=CHOICES)
    return ChatView(context, generation_of(context), body)


def vllm(context: ServingContext):
    body = CompletionBody(prompt="a", logprobs=TOP, n=CHOICES)
    return vllm_generate.GenerateView(context, generation_of(context), body)


def sglang(context: ServingContext):
    options = sglang_generate_body.LogprobOptions(True, 0, TOP)
    prompt = sglang_generate_body.Prompt("r", PROMPT, SamplingParams(), TextOptions(), options, False)
    prompts = sglang_generate_body.Prompts([prompt], CHOICES, False, "")
    generation = generation_of(context, sglang_generate.LabelledGeneration)
    return sglang_generate.GenerateView(context, generation, sglang_generate_body.GenerateBody(), prompts)


VIEWS = [completion, chat, vllm, sglang]
SLICES = CHOICES * TOKENS * TOP // (SLICE + TOP + 1)


async def run(view: Any) -> list:
    async with view.generation:
        return await view.generation.step()


@pytest.mark.parametrize("make", VIEWS)
def test_a_whole_reply_is_made_in_slices(context, make):
    async def main() -> None:
        view = make(context)
        await run(view)
        body, told = await rounds(view.body())
        assert told >= SLICES
        data = msgspec.json.decode(msgspec.json.encode(body))
        assert len(data if make is sglang else data["choices"]) == CHOICES

    asyncio.run(main())


@pytest.mark.parametrize("make", VIEWS)
def test_the_chunk_of_a_late_reader_is_made_in_slices(context, make):
    async def main() -> None:
        view = make(context)
        deltas = await run(view)
        assert [index for index, _ in deltas] == list(range(CHOICES)), "one chunk per choice"
        told = [(await rounds(view.events(*delta)))[1] for delta in deltas]
        assert sum(told) >= SLICES

    asyncio.run(main())


def test_the_tokens_of_a_late_reader_are_decoded_in_slices(context):
    async def main() -> None:
        _, told = await rounds(run(completion(context)))
        assert told >= CHOICES * TOKENS * WORK_PER_TOKEN // (SLICE + TOKENS_AT_ONCE * WORK_PER_TOKEN)

    asyncio.run(main())


def test_logprobs_of_a_long_prompt_are_made_in_slices(context):
    async def main() -> None:
        generation = generation_of(context, prompt=[97] * 2000)
        view = CompletionView(context, generation, CompletionBody(prompt="a", prompt_logprobs=TOP))
        await run(view)
        _, told = await rounds(view.body())
        assert told >= 2000 * TOP // (SLICE + 2 * TOP + 2)

    asyncio.run(main())


def test_replies_that_are_made_at_once_take_turns(context):
    """Ten replies take ten times the rounds of one, since each round has a slice of one reply only."""

    async def main() -> None:
        views = [chat(context) for _ in range(10)]
        for view in views:
            await run(view)
        _, told = await rounds(asyncio.gather(*(view.body() for view in views)))
        assert told >= 10 * SLICES

    asyncio.run(main())


def test_a_reply_that_is_given_up_does_not_keep_its_turn(context):
    async def main() -> None:
        views = [chat(context) for _ in range(3)]
        for view in views:
            await run(view)
        tasks = [asyncio.create_task(view.body()) for view in views]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert (await tasks[2])["choices"]

    asyncio.run(main())


def test_an_event_that_repeats_everything_encodes_each_token_once(context):
    """In SGLang's streams each event repeats everything so far."""
    made = []

    def items(numbers: range):
        for number in numbers:
            made.append(number)
            yield number

    async def main() -> None:
        array = GrowingArray(Pace(asyncio.Lock()))
        assert bytes(array.raw()) == b"[]"
        for start in (0, 2, 2, 4):
            await array.extend(items(range(start, start + 2)))
            await array.extend([])
        assert bytes(array.raw()) == b"[0,1,2,3,2,3,4,5]" and len(made) == 8

    asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=20),
    sizes=st.integers(1, 7),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
    cut=st.integers(0, 40),
    finish=st.sampled_from([None, "length", "stop"]),
    first=st.integers(0, 3),
)
def test_an_output_in_pieces_is_read_as_the_whole_one(tokenizer, text, sizes, stops, cut, finish, first):
    ids = tokenizer.encode_now(text)
    middle = min(cut, len(ids))
    spans = [Span("v1", 1, first, first + middle), Span("v2", 2, first + middle, first + len(ids), True)]
    output = Output("r", 0, ids, [Logprob(-float(i)) for i in ids], [s for s in spans if s.end > s.start], finish,
                    prompt_logprobs=[ENTRY], cached_tokens=3, num_preempted=1, message="why")  # fmt: skip

    def told(size: int) -> tuple:
        choice = Choice(tokenizer, [], TextOptions(tuple(stops)))
        choice.feed(Output("r", 0, [97] * first, spans=[Span("v0", 0, 0, first)] if first else []))
        shown = "".join(choice.feed(piece).text for piece in pieces(output, size) if choice.finish_reason is None)
        return (shown, choice.text, choice.token_ids, choice.spans, choice.finish_reason, choice.stop_reason,
                choice.prompt_logprobs, choice.num_preempted, len(choice.logprobs))  # fmt: skip

    assert told(sizes) == told(10**6)
